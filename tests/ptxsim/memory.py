"""Memory: the tensors of this process as global memory, and the shared memory of blocks.

An access is refused where it is not aligned or outside, in shared memory also where nothing has
been written, a copy is under way, or a barrier lies.
"""

import ctypes
import sys
from bisect import bisect_right
from types import FrameType

import numpy as np
import torch

from .ptx import KernelError

WRITTEN, UNWRITTEN, UNDER_WAY, BARRIER = range(4)
_WHAT = {
    UNWRITTEN: "shared memory that nothing was written to",
    UNDER_WAY: "shared memory that a copy under way will write",
    BARRIER: "the bytes of an mbarrier",
}


def _rows(data: np.ndarray, size: int, count: int) -> np.ndarray:
    """Bytes as rows of ``count`` elements of ``size`` bytes, for accesses of that shape."""
    whole = len(data) // (size * count) * (size * count)
    return data[:whole].view(f"u{size}").reshape(-1, count)


def _check_alignment(addresses: np.ndarray, bytes_: int) -> None:
    wrong = addresses % addresses.dtype.type(bytes_) != 0
    if wrong.any():
        raise KernelError(f"address {addresses[wrong][0]:#x} is not aligned to {bytes_} bytes")


_OURS = {"sageattention3", __name__.split(".")[0]}  # packages
_DEPTH = 2  # of containers in containers


def _held_by(frame: FrameType):
    """Tensors in local variables of the functions of ours that led to ``frame``."""
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        yield from _tensors_in(list(frame.f_locals.values()), _DEPTH)
        frame = frame.f_back


def _tensors_in(things, depth: int):
    for x in things:
        if isinstance(x, torch.Tensor):
            yield x
        elif depth and isinstance(x, (tuple, list)):
            yield from _tensors_in(x, depth - 1)
        elif depth and isinstance(x, dict):
            yield from _tensors_in(x.values(), depth - 1)
        elif depth and type(x).__module__.split(".")[0] in _OURS and hasattr(x, "__dict__"):
            yield from _tensors_in(vars(x).values(), depth - 1)


class Tensors:
    """Global memory: the storages of the CPU tensors that those who launch a kernel hold.

    A launch gets addresses only, so their owners are looked for in the functions that led to it.
    """

    def __init__(self):
        tensors = [x for x in _held_by(sys._getframe(1)) if x.device.type == "cpu"]
        storages = [x.untyped_storage() for x in tensors]
        found = {x.data_ptr(): x.nbytes() for x in storages if x.nbytes()}
        self._starts = sorted(found)
        self._found = found
        self._bytes: dict[int, np.ndarray] = {}

    def load(self, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
        """[n, count] of ``size`` bytes at ``addresses`` [n] of uint64."""
        result = np.empty((len(addresses), count), f"u{size}")
        for data, lanes, index in self._places(addresses, size * count):
            result[lanes] = _rows(data, size, count)[index]
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        for data, lanes, index in self._places(addresses, values[0].nbytes):
            _rows(data, values.itemsize, values.shape[1])[index] = values[lanes]

    def bytes_at(self, address: int, count: int) -> np.ndarray:
        """``count`` bytes, without a copy."""
        start, data = self._storage(address, count)
        return data[address - start :][:count]

    def _places(self, addresses: np.ndarray, bytes_: int):
        """(bytes of a tensor, which addresses lie in it, their rows there) of each tensor."""
        _check_alignment(addresses, bytes_)
        rest = np.arange(len(addresses))
        while len(rest):
            start, data = self._storage(int(addresses[rest[0]]), bytes_)
            offsets = addresses[rest] - np.uint64(start)  # huge for what lies before it
            inside = offsets <= np.uint64(len(data) - bytes_)
            yield data, rest[inside], (offsets[inside] // np.uint64(bytes_)).astype("i8")
            rest = rest[~inside]

    def _storage(self, address: int, count: int) -> tuple[int, np.ndarray]:
        """Where the tensor that has these bytes starts, and all of its bytes."""
        start = self._starts[bisect_right(self._starts, address) - 1] if self._starts else 0
        size = self._found.get(start, 0)
        if not start <= address <= start + size - count:
            raise KernelError(f"{count} bytes at {address:#x} are in no tensor")
        if start not in self._bytes:
            memory = (ctypes.c_uint8 * size).from_address(start)
            self._bytes[start] = np.frombuffer(memory, np.uint8)
        return start, self._bytes[start]


class Shared:
    """Shared memory of all blocks that run together, ``size`` bytes each."""

    def __init__(self, blocks: int, size: int):
        self.size = size
        self.stride = -(-max(size, 1) // 128) * 128
        self._data = np.full(blocks * self.stride, 0xFF, np.uint8)
        self._state = np.full(blocks * self.stride, UNWRITTEN, np.uint8)

    def place(self, addresses: np.ndarray, blocks: np.ndarray, bytes_: int) -> np.ndarray:
        """Indices of the first bytes at ``addresses`` [n] of each one's block [n]."""
        _check_alignment(addresses, bytes_)
        addresses = addresses.astype("i8")
        outside = addresses + bytes_ > self.size
        if outside.any():
            raise KernelError(
                f"{bytes_} bytes at shared address {addresses[outside][0]:#x} lie outside of "
                f"{self.size} bytes"
            )
        return addresses + blocks * self.stride

    def load(self, places: np.ndarray, size: int, count: int) -> np.ndarray:
        self._states(places, size * count, UNWRITTEN, "read of")
        return _rows(self._data, size, count)[places // (size * count)]

    def store(self, places: np.ndarray, values: np.ndarray) -> None:
        bytes_, count = values[0].nbytes, values.shape[1]
        states, index = self._states(places, bytes_, UNDER_WAY, "write to")
        states[index] = WRITTEN
        _rows(self._data, values.itemsize, count)[index] = values

    def expect(self, places: np.ndarray, bytes_: int) -> None:
        """Copies to each of ``places`` are under way."""
        states, index = self._states(places, bytes_, UNDER_WAY, "copy to")
        states[index] = UNDER_WAY

    def arrive(self, places: np.ndarray, values: np.ndarray) -> None:
        """The end of those copies, of bytes [n, count]."""
        index = places // values.shape[1]
        _rows(self._data, 1, values.shape[1])[index] = values
        _rows(self._state, 1, values.shape[1])[index] = WRITTEN

    def reserve(self, place: int) -> None:
        """These 8 bytes are an mbarrier from now on."""
        self._state[place : place + 8] = BARRIER

    def _states(self, places: np.ndarray, bytes_: int, least: int, what: str):
        """States as rows of bytes, and which rows; refused where one is ``least`` or above."""
        states, index = _rows(self._state, 1, bytes_), places // bytes_
        refused = states[index] >= least
        if refused.any():
            raise KernelError(f"{what} {_WHAT[int(states[index][refused][0])]}")
        return states, index
