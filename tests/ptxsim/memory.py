"""Memory: the tensors of this process as global memory, and the shared memory of blocks.

An access is refused where it is not aligned or outside, in shared memory also where nothing has
been written, a copy is under way, or a barrier lies.
"""

import sys
from bisect import bisect_right

import numpy as np
import torch

from .ptx import KernelError
from .races import Races

WRITTEN, UNWRITTEN, UNDER_WAY, BARRIER = range(4)
_WHAT = {
    UNWRITTEN: "shared memory that nothing was written to",
    UNDER_WAY: "shared memory that a copy under way will write",
    BARRIER: "the bytes of an mbarrier",
}
_OURS = {"sageattention3", __name__.split(".")[0]}  # packages


def _rows(data: np.ndarray, size: int, count: int) -> np.ndarray:
    """Bytes as rows of ``count`` elements of ``size`` bytes, for accesses of that shape."""
    whole = len(data) // (size * count) * (size * count)
    return data[:whole].view(f"u{size}").reshape(-1, count)


def _check_alignment(addresses: np.ndarray, bytes_: int) -> None:
    wrong = addresses % addresses.dtype.type(bytes_) != 0
    if wrong.any():
        raise KernelError(f"address {addresses[wrong][0]:#x} is not aligned to {bytes_} bytes")


def tensors_of_callers() -> dict[int, np.ndarray]:
    """Storages of CPU tensors that our functions which led here hold in local variables.

    A launch gets addresses only, so this is how to know to whom they belong. Answers their bytes by
    where they start.
    """
    frame, found = sys._getframe(1), {}
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        for x in _tensors_in(frame.f_locals.values(), 2):
            storage = x.untyped_storage()
            if x.device.type == "cpu" and storage.data_ptr() not in found:
                data = torch.empty(0, dtype=torch.uint8).set_(storage)
                found[storage.data_ptr()] = data.numpy()
        frame = frame.f_back
    return found


def _tensors_in(things, depth: int):
    """Those among ``things``, and in ``depth`` layers of containers and of our objects."""
    for x in things:
        if isinstance(x, torch.Tensor):
            yield x
        elif depth:
            if type(x).__module__.split(".")[0] in _OURS:
                x = getattr(x, "__dict__", x)
            x = list(x.values()) if isinstance(x, dict) else x
            yield from _tensors_in(x if isinstance(x, (tuple, list)) else (), depth - 1)


class Memory:
    """Regions of bytes, by the addresses where they start."""

    def __init__(self, regions: dict[int, np.ndarray]):
        self._regions = {0: np.zeros(0, np.uint8), **regions}
        self._starts = sorted(self._regions)

    def load(self, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
        """[n, count] of ``size`` bytes at ``addresses`` [n] of uint64."""
        result = np.empty((len(addresses), count), f"u{size}")
        for data, lanes, index in self._places(addresses, size * count):
            result[lanes] = _rows(data, size, count)[index]
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        for data, lanes, index in self._places(addresses, values[0].nbytes):
            _rows(data, values.itemsize, values.shape[1])[index] = values[lanes]

    def _places(self, addresses: np.ndarray, bytes_: int):
        """(bytes of a region, which addresses lie in it, their rows there) of each region."""
        _check_alignment(addresses, bytes_)
        addresses, rest = addresses.astype("i8"), np.arange(len(addresses))
        while len(rest):
            first = addresses[rest[0]]
            start = self._starts[bisect_right(self._starts, first) - 1]
            data, offsets = self._regions[start], addresses[rest] - start
            inside = (offsets >= 0) & (offsets <= len(data) - bytes_)
            if not inside[0]:
                raise KernelError(f"{bytes_} bytes at {first:#x} are in no tensor or parameter")
            yield data, rest[inside], offsets[inside] // bytes_
            rest = rest[~inside]


class Shared:
    """Shared memory of all blocks that run together, ``size`` bytes each.

    Accesses are [n], each by one of ``warps`` to an address of its block.
    """

    def __init__(self, blocks: int, per_block: int, size: int):
        self._size, self.stride = size, -(-max(size, 1) // 128) * 128
        self._data = np.full(blocks * self.stride, 0xFF, np.uint8)
        self._state = np.full(blocks * self.stride, UNWRITTEN, np.uint8)
        self.races = Races(blocks, per_block, blocks * self.stride // 4)

    def place(self, warps: np.ndarray, addresses: np.ndarray, bytes_: int) -> np.ndarray:
        """Indices of the first bytes at ``addresses`` of each one's block."""
        _check_alignment(addresses, bytes_)
        addresses = addresses.astype("i8")
        outside = addresses + bytes_ > self._size
        if outside.any():
            raise KernelError(
                f"{bytes_} bytes at shared address {addresses[outside][0]:#x} lie outside of "
                f"{self._size} bytes"
            )
        return addresses + warps // self.races.per_block * self.stride

    def load(self, warps, addresses, size: int, count: int, by_proxy=False) -> np.ndarray:
        """[n, count] of ``size`` bytes."""
        places = self._touch("read of", warps, addresses, size * count, by_proxy)
        return _rows(self._data, size, count)[places // (size * count)]

    def store(self, warps, addresses, values: np.ndarray) -> None:
        self.fill(self._touch("write to", warps, addresses, values[0].nbytes), values)

    def begin_copy(self, warps, addresses, bytes_: int, by_proxy=False) -> np.ndarray:
        """Copies are under way; answers where to, for ``fill`` to end them."""
        places = self._touch("copy to", warps, addresses, bytes_, by_proxy)
        _rows(self._state, 1, bytes_)[places // bytes_] = UNDER_WAY
        return places

    def _touch(self, what: str, warps, addresses, bytes_: int, by_proxy=False) -> np.ndarray:
        """The places of an access, if it is allowed."""
        access, least = self.races.write, UNDER_WAY  # the least state that is refused
        if what == "read of":
            access, least = self.races.read, UNWRITTEN
        places = self.place(warps, addresses, bytes_)
        access(warps, places, bytes_, by_proxy)
        states = _rows(self._state, 1, bytes_)[places // bytes_]
        if (states >= least).any():
            raise KernelError(f"{what} {_WHAT[int(states[states >= least][0])]}")
        return places

    def fill(self, places: np.ndarray, values: np.ndarray) -> None:
        count, bytes_ = values.shape[1], values.itemsize * values.shape[1]
        _rows(self._data, values.itemsize, count)[places // bytes_] = values
        _rows(self._state, 1, bytes_)[places // bytes_] = WRITTEN

    def reserve(self, place: int) -> None:
        """These 8 bytes are an mbarrier from now on."""
        self._state[place : place + 8] = BARRIER
