"""Finds accesses to shared memory that nothing orders, whatever order this run happened to take.

Each warp of a block counts its own releases (arrivals at barriers) and knows, per other warp, up to
which release it has seen that one's work: a vector clock. An access must know of the last write to
each word, and a write of the last reads too. Lanes of one warp are taken to be ordered.

What ordinary stores wrote must also pass a proxy fence, by a warp that knows of it, before wgmma or
bulk copies (the asynchronous proxy) come to it.
"""

import numpy as np

from .ptx import KernelError

_WORD = 4


class Races:
    def __init__(self, warps: int, per_block: int, words: int):
        self._in_block = np.arange(warps) % per_block
        self.clocks = np.zeros((warps, per_block), np.int32)  # what each warp knows
        self.clocks[np.arange(warps), self._in_block] = 1
        self._writer = np.zeros(words, np.int16)  # warp of the block
        self._written = np.zeros(words, np.int32)  # at which of its times; 0: never
        self._unfenced = np.zeros(words, bool)  # an ordinary store, with no proxy fence since
        self._read = np.zeros((words, per_block), np.int32)  # by each warp of the block, likewise

    def release(self, warp: int) -> np.ndarray:
        """What ``warp`` knows on arrival at a barrier; what it does later is not part of it."""
        known = self.clocks[warp].copy()
        self.clocks[warp, self._in_block[warp]] += 1
        return known

    def acquire(self, warps, known: np.ndarray) -> None:
        self.clocks[warps] = np.maximum(self.clocks[warps], known)

    def fence(self, warps: np.ndarray) -> None:
        """A proxy fence: for all that ``warps`` know to be written."""
        unfenced = self._unfenced.reshape(len(self.clocks) // self.clocks.shape[1], -1)
        for warp in warps:
            block = warp // self.clocks.shape[1]
            words = block * unfenced.shape[1] + np.flatnonzero(unfenced[block])
            known = self._written[words] <= self.clocks[warp, self._writer[words]]
            self._unfenced[words] = ~known

    def read(self, warps: np.ndarray, places: np.ndarray, bytes_: int, by_proxy=False) -> None:
        """``bytes_`` at each of ``places`` [n] by ``warps`` [n]."""
        words = self._words(places, bytes_)
        if words is not None:
            self._check_writes(warps, words, by_proxy)
            mine = self._in_block[warps]
            self._read[words, mine[:, None]] = self.clocks[warps, mine][:, None]

    def write(self, warps: np.ndarray, places: np.ndarray, bytes_: int, by_proxy=False) -> None:
        words = self._words(places, bytes_)
        if words is not None:
            self._check_writes(warps, words, by_proxy)
            unseen = self._read[words] > self.clocks[warps][:, None]
            if unseen.any():
                self._refuse(warps, unseen.any((1, 2)), np.argmax(unseen.any((0, 1))), "read")
            mine = self._in_block[warps]
            self._unfenced[words] = not by_proxy
            self._writer[words] = mine[:, None]
            self._written[words] = self.clocks[warps, mine][:, None]
            lost = self._writer[words] != mine[:, None]  # two warps in this very step
            if lost.any():
                self._refuse(warps, lost.any(1), self._writer[words][lost][0], "written")

    @staticmethod
    def _words(places: np.ndarray, bytes_: int) -> np.ndarray | None:
        """[n, words]; None for parts of words, which are not followed."""
        if bytes_ % _WORD:
            return None
        return places[:, None] // _WORD + np.arange(bytes_ // _WORD)

    def _check_writes(self, warps: np.ndarray, words: np.ndarray, by_proxy: bool) -> None:
        writers = self._writer[words]
        unseen = self._written[words] > self.clocks[warps[:, None], writers]
        if unseen.any():
            self._refuse(warps, unseen.any(1), writers[unseen][0], "written")
        if by_proxy and self._unfenced[words].any():
            raise KernelError("no proxy fence since an ordinary store to this shared memory")

    def _refuse(self, warps, which, other: int, done: str) -> None:
        raise KernelError(
            f"race: warp {self._in_block[warps[which]][0]} touches shared memory that warp {other} "
            f"has {done}, with no barrier between"
        )
