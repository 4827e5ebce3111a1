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

UNWRITTEN, WRITTEN, UNDER_WAY, BARRIER = range(4)
_WHAT = {
    UNWRITTEN: "shared memory that nothing was written to",
    UNDER_WAY: "shared memory that a copy under way will write",
    BARRIER: "the bytes of an mbarrier",
}


class _Rows:
    """Bytes as rows of ``count`` elements of ``size`` bytes, for accesses of that shape."""

    def __init__(self, data: np.ndarray):
        self.data = data
        self._shapes: dict[tuple[int, int], np.ndarray] = {}

    def of(self, size: int, count: int) -> np.ndarray:
        key = size, count
        if key not in self._shapes:
            whole = len(self.data) // (size * count) * (size * count)
            self._shapes[key] = self.data[:whole].view(f"u{size}").reshape(-1, count)
        return self._shapes[key]


def _shift(size: int, count: int):
    return (size * count).bit_length() - 1


def _check_alignment(addresses: np.ndarray, bytes_: int) -> None:
    wrong = addresses % addresses.dtype.type(bytes_) != 0
    if wrong.any():
        raise KernelError(f"address {addresses[wrong][0]:#x} is not aligned to {bytes_} bytes")


_OURS = {"sageattention3", __name__.split(".")[0]}  # packages
_DEPTH = 3  # of containers in containers


def _held_by(frame: FrameType) -> list[torch.Tensor]:
    """Tensors in local variables of the functions of ours that led to ``frame``."""
    found, things = [], []
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        things.extend(frame.f_locals.values())
        frame = frame.f_back
    for _ in range(_DEPTH):
        found += [x for x in things if isinstance(x, torch.Tensor)]
        inner = []
        for x in things:
            if isinstance(x, (tuple, list)):
                inner.extend(x)
            elif isinstance(x, dict):
                inner.extend(x.values())
            elif type(x).__module__.split(".")[0] in _OURS and hasattr(x, "__dict__"):
                inner.extend(vars(x).values())
        things = inner
    return found


class Tensors:
    """Global memory: the storages of the CPU tensors that those who launch a kernel hold.

    A launch gets addresses only, so their owners are looked for in the functions that led to it.
    """

    def __init__(self):
        tensors = [x for x in _held_by(sys._getframe(1)) if x.device.type == "cpu"]
        storages = [x.untyped_storage() for x in tensors]
        found = {x.data_ptr(): x.nbytes() for x in storages if x.nbytes()}
        self._starts = sorted(found)
        self._sizes = [found[start] for start in self._starts]
        self._rows: dict[int, _Rows] = {}

    def load(self, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
        """[n, count] of ``size`` bytes at ``addresses`` [n] of uint64."""
        result = np.empty((len(addresses), count), f"u{size}")
        for rows, lanes, index in self._places(addresses, size, count):
            result[lanes] = rows[index]
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        for rows, lanes, index in self._places(addresses, values.itemsize, values.shape[1]):
            rows[index] = values[lanes]

    def bytes_at(self, address: int, count: int) -> np.ndarray:
        """``count`` bytes, without a copy."""
        rows, offset = self._storage(address, count)
        return rows.data[offset : offset + count]

    def _places(self, addresses, size: int, count: int):
        _check_alignment(addresses, size * count)
        rest = np.arange(len(addresses))
        while len(rest):
            here = addresses[rest]
            first = int(here[0])
            rows, offset = self._storage(first, size * count)
            start = np.uint64(first - offset)
            end = np.uint64(len(rows.data) - size * count)
            inside = (here >= start) & (here - start <= end)
            lanes = rest[inside]
            index = (addresses[lanes] - start) >> np.uint64(_shift(size, count))
            yield rows.of(size, count), lanes, index.astype("i8")
            rest = rest[~inside]

    def _storage(self, address: int, count: int) -> tuple[_Rows, int]:
        i = bisect_right(self._starts, address) - 1
        if i < 0 or address + count > self._starts[i] + self._sizes[i]:
            raise KernelError(f"{count} bytes at {address:#x} are in no tensor")
        start = self._starts[i]
        if start not in self._rows:
            memory = (ctypes.c_uint8 * self._sizes[i]).from_address(start)
            self._rows[start] = _Rows(np.frombuffer(memory, np.uint8))
        return self._rows[start], address - start


class Shared:
    """Shared memory of all blocks that run together, ``size`` bytes each."""

    def __init__(self, blocks: int, size: int):
        self.size = size
        self.stride = -(-max(size, 1) // 128) * 128
        self._data = _Rows(np.full(blocks * self.stride, 0xFF, np.uint8))
        self._state = _Rows(np.full(blocks * self.stride, UNWRITTEN, np.uint8))

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
        index = places >> _shift(size, count)
        states = self._state.of(size, count)[index]
        if (states != _everywhere(WRITTEN, size)).any():
            self._refuse(states.view(np.uint8), "read of")
        return self._data.of(size, count)[index]

    def store(self, places: np.ndarray, values: np.ndarray) -> None:
        size, count = values.itemsize, values.shape[1]
        index = places >> _shift(size, count)
        states = self._state.of(size, count)
        if (states[index] & _everywhere(UNDER_WAY, size)).any():
            self._refuse(states[index].view(np.uint8), "write to")
        states[index] = _everywhere(WRITTEN, size)
        self._data.of(size, count)[index] = values

    def expect(self, places: np.ndarray, count: int) -> None:
        """Copies of ``count`` bytes to each of ``places`` are under way."""
        states, index = self._state.of(1, count), places >> _shift(1, count)
        if (states[index] >= UNDER_WAY).any():
            self._refuse(states[index], "copy to")
        states[index] = UNDER_WAY

    def arrive(self, places: np.ndarray, values: np.ndarray) -> None:
        """The end of those copies, of bytes [n, count]."""
        index = places >> _shift(1, values.shape[1])
        self._data.of(1, values.shape[1])[index] = values
        self._state.of(1, values.shape[1])[index] = WRITTEN

    def reserve(self, place: int) -> None:
        """These 8 bytes are an mbarrier from now on."""
        self._state.data[place : place + 8] = BARRIER

    def _refuse(self, states: np.ndarray, what: str) -> None:
        bad = states.ravel()
        bad = bad[(bad != WRITTEN) & ((what == "read of") | (bad >= UNDER_WAY))]
        raise KernelError(f"{what} {_WHAT[int(bad[0])]}")


def _everywhere(state: int, size: int):
    return np.dtype(f"u{size}").type(int.from_bytes(bytes([state] * size), "little"))
