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
    def __init__(self, blocks: int, per_block: int, words: int):
        self.per_block, warps = per_block, np.arange(blocks * per_block)
        self.clocks = np.zeros((len(warps), per_block), np.int32)  # what each warp knows
        self.clocks[warps, warps % per_block] = 1
        # When each warp of the block, by its own clock, last touched each word; 0: never.
        self._read, self._written = np.zeros((2, words, per_block), np.int32)
        self._unfenced = np.zeros(words, bool)  # an ordinary store, with no proxy fence since

    def release(self, warp: int) -> np.ndarray:
        """What ``warp`` knows on arrival at a barrier; what it does later is not part of it."""
        known = self.clocks[warp].copy()
        self.clocks[warp, warp % self.per_block] += 1
        return known

    def acquire(self, warps, known: np.ndarray) -> None:
        self.clocks[warps] = np.maximum(self.clocks[warps], known)

    def fence(self, warps: np.ndarray) -> None:
        """A proxy fence: for all that ``warps`` know to be written."""
        words_per_block = len(self._unfenced) * self.per_block // len(self.clocks)
        for warp in warps:
            first = warp // self.per_block * words_per_block
            words = first + np.flatnonzero(self._unfenced[first : first + words_per_block])
            self._unfenced[words] = (self._written[words] > self.clocks[warp]).any(1)

    def read(self, warps: np.ndarray, places: np.ndarray, bytes_: int, by_proxy=False) -> None:
        """``bytes_`` at ``places`` [n] by ``warps`` [n]; parts of words are not followed."""
        words = self._words(places, bytes_, by_proxy)
        self._check(self._written, warps, words, "written")
        self._note(self._read, warps, words)

    def write(self, warps: np.ndarray, places: np.ndarray, bytes_: int, by_proxy=False) -> None:
        words = self._words(places, bytes_, by_proxy)
        self._check(self._written, warps, words, "written")
        self._check(self._read, warps, words, "read")
        self._note(self._written, warps, words)
        self._check(self._written, warps, words, "written")  # by two warps in this very step
        self._unfenced[words] = not by_proxy

    def _words(self, places: np.ndarray, bytes_: int, by_proxy: bool) -> np.ndarray:
        """[n, words]"""
        words = places[:, None] // _WORD + np.arange(bytes_ // _WORD)
        if by_proxy and self._unfenced[words].any():
            raise KernelError("no proxy fence since an ordinary store to this shared memory")
        return words

    def _check(self, times: np.ndarray, warps: np.ndarray, words: np.ndarray, done: str) -> None:
        """Refuse to touch ``words`` [n, words] at ``times`` that ``warps`` do not know of."""
        unseen = times[words] > self.clocks[warps][:, None]
        if unseen.any():
            which, _, other = np.argwhere(unseen)[0]
            raise KernelError(
                f"race: warp {warps[which] % self.per_block} touches shared memory that warp "
                f"{other} has {done}, with no barrier between"
            )

    def _note(self, times: np.ndarray, warps: np.ndarray, words: np.ndarray) -> None:
        mine = warps % self.per_block
        times[words, mine[:, None]] = self.clocks[warps, mine][:, None]
