"""Asynchronous copies from global to shared memory: when they end is the scheduler's choice."""

from dataclasses import dataclass

import numpy as np

from .ptx import KernelError

_ROW = 16  # bytes; a bulk copy is one of several rows


@dataclass
class _Copy:
    places: np.ndarray  # [n] in shared memory
    values: np.ndarray  # [n, bytes]


@dataclass
class _ByThreads(_Copy):
    threads: np.ndarray  # [n], counted through all warps
    groups: np.ndarray  # [n], each thread's groups counted from 0

    def take(self, chosen: np.ndarray) -> "_ByThreads":
        return _ByThreads(*(x[chosen] for x in vars(self).values()))


@dataclass
class _InBulk(_Copy):
    barrier: int
    known: np.ndarray  # by the warp that began it, see races.py


class Copies:
    def __init__(self, machine):
        self._m = machine
        self._pending: list[_Copy] = []
        self._groups = np.zeros(machine.shape, "i8").ravel()  # committed by each thread

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self, targets: np.ndarray, sources: np.ndarray, parts: np.ndarray, size: int) -> None:
        """By each active thread one copy of ``size`` bytes, for [n] addresses.

        parts: how many bytes are read, all or none; zeros stand for the rest.
        """
        m, threads = self._m, np.flatnonzero(self._m.mask)
        places = m.shared.place(targets, m.active(m.block_of_lane), size)
        if ((parts != 0) & (parts != size)).any():
            raise KernelError("a copy reads a part of its bytes")
        values = np.zeros((len(threads), size), "u1")
        values[parts > 0] = m.tensors.load(sources[parts > 0], 1, size)
        m.races.write(threads // 32, places, size)
        m.shared.expect(places, size)
        self._pending.append(_ByThreads(places, values, threads, self._groups[threads]))

    def commit(self) -> None:
        self._groups[self._m.mask.ravel()] += 1

    def wait(self, pending: int | None = None) -> None:
        """End active threads' committed groups but for the last ``pending``; None: all copies."""
        waiting = self._m.mask.ravel()
        rest = []
        for copy in self._pending:
            if isinstance(copy, _ByThreads):
                ended = waiting[copy.threads]
                if pending is not None:
                    ended = ended & (copy.groups < self._groups[copy.threads] - pending)
                self._m.shared.arrive(copy.places[ended], copy.values[ended])
                copy = None if ended.all() else copy.take(~ended)
            rest.append(copy)
        self._pending = [copy for copy in rest if copy]

    def begin_bulk(self, warp: int, target: int, source: int, size: int, barrier: int) -> None:
        m = self._m
        if size % _ROW or source % _ROW or size == 0:
            raise KernelError(
                f"a bulk copy of {size} bytes from {source:#x}: not in units of {_ROW}"
            )
        targets = target + np.arange(0, size, _ROW)
        blocks = np.full(len(targets), m.block_of_warp[warp])
        places = m.shared.place(targets, blocks, _ROW)
        values = m.tensors.bytes_at(source, size).reshape(-1, _ROW).copy()
        m.races.write(np.full(len(places), warp), places, _ROW, by_proxy=True)
        m.shared.expect(places, _ROW)
        found = m.mbarriers.find(warp, barrier)
        self._pending.append(_InBulk(places, values, found, m.races.clocks[warp].copy()))

    def finish_one(self, index: int) -> None:
        copy = self._pending.pop(index)
        self._m.shared.arrive(copy.places, copy.values)
        if isinstance(copy, _InBulk):
            self._m.mbarriers.complete(copy.barrier, copy.values.size, copy.known)
