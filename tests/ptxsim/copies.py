"""Asynchronous copies from global to shared memory: when they end is the scheduler's choice."""

from dataclasses import dataclass

import numpy as np

from .ptx import KernelError

_ROW = 16  # bytes; a bulk copy is one of several rows


@dataclass
class _Copy:
    places: np.ndarray  # [n] in shared memory
    values: np.ndarray  # [n, bytes]
    threads: np.ndarray | None = None  # [n], counted through all warps; None: in bulk
    groups: np.ndarray | None = None  # [n], each thread's groups counted from 0
    barrier: int | None = None  # the place of a bulk copy's one
    known: np.ndarray | None = None  # by the warp that began it, see races.py


class Copies:
    def __init__(self, machine):
        self._m = machine
        self.pending: list[_Copy] = []
        self._committed = np.zeros(machine.shape, "i8").ravel()  # groups of each thread

    def begin(self, targets: np.ndarray, sources: np.ndarray, size: int) -> None:
        """By each active thread one copy of ``size`` bytes, for [n] addresses."""
        m, threads = self._m, np.flatnonzero(self._m.mask)
        places = m.shared.begin_copy(threads // 32, targets, size)
        values = m.tensors.load(sources, 1, size)
        self.pending.append(_Copy(places, values, threads, self._committed[threads]))

    def commit_group(self) -> None:
        self._committed[self._m.mask.ravel()] += 1

    def wait_group(self, pending: int) -> None:
        """End active threads' groups but for the last ``pending``; -1: also what is in none yet."""
        for copy in self.pending:
            if copy.threads is not None:
                ended = copy.groups < self._committed[copy.threads] - pending
                ended &= self._m.mask.ravel()[copy.threads]
                self._m.shared.fill(copy.places[ended], copy.values[ended])
                for name in ("places", "values", "threads", "groups"):
                    setattr(copy, name, getattr(copy, name)[~ended])
        self.pending = [copy for copy in self.pending if len(copy.places)]

    def wait_all(self) -> None:
        self.wait_group(-1)

    def begin_bulk(self, warp: int, target: int, source: int, size: int, barrier: int) -> None:
        m, rows = self._m, np.arange(0, size, _ROW)
        if size % _ROW or size == 0:
            raise KernelError(f"a bulk copy of {size} bytes from {source:#x}: not {_ROW} each")
        warps = np.full(len(rows), warp)
        places = m.shared.begin_copy(warps, target + rows, _ROW, by_proxy=True)
        values = m.tensors.load((source + rows).astype("u8"), 1, _ROW)
        found = m.mbarriers.find(warp, barrier)
        self.pending.append(_Copy(places, values, barrier=found, known=m.races.clocks[warp].copy()))

    def finish_one(self, index: int) -> None:
        copy = self.pending.pop(index)
        self._m.shared.fill(copy.places, copy.values)
        if copy.threads is None:
            self._m.mbarriers.advance(copy.barrier, 0, -copy.values.size, copy.known)
