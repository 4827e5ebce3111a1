"""Time that a calibration may take beside the sampling that it watches."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

LIMIT = 2.5  # a calibrated run over a plain one, at most
_MARGIN = 0.95  # of the extra time: what is planned may take longer


def clock(device: torch.device) -> float:
    """Seconds, once ``device`` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Allowance:
    """Lets extra work take up to ``limit - 1`` times as long as the plain work so far."""

    def __init__(self, limit: float = LIMIT, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.extra = 0.0
        self._limit = limit
        self._plain = 0.0
        self._since: tuple[float, float] | None = None  # start of plain work, extra by then

    @contextmanager
    def plain_work(self) -> Iterator[None]:
        """Around what the sampling does in any case; extra work within it is left out."""
        self._since = self.now(), self.extra
        try:
            yield
        finally:
            self._plain, self._since = self.plain, None

    @contextmanager
    def extra_work(self) -> Iterator[None]:
        start = self.now()
        try:
            yield
        finally:
            self.extra += self.now() - start

    @property
    def plain(self) -> float:
        """Seconds of plain work so far."""
        if self._since is None:
            return self._plain
        start, extra = self._since
        return self._plain + (self.now() - start) - (self.extra - extra)

    def affords(self, seconds: float, share: float = 1.0) -> bool:
        """Whether work of ``seconds`` stays within ``share`` of what extra work may take."""
        if self._limit == float("inf"):
            return True
        return self.extra + seconds <= share * _MARGIN * (self._limit - 1) * self.plain
