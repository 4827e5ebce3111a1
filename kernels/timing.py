"""How long calls take on a GPU, side by side."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

FLUSHED_BYTES = 256 << 20  # more than any L2
ROUNDS = 5
ROUND_SECONDS = 0.05  # of each contestant in each round
CALLS_PER_ROUND = (2, 20)  # at least, at most
PAUSE_SECONDS = 0.2

Timer = Callable[[Callable, int], list[float]]  # (call, times) -> milliseconds of each


class GpuTimer:
    """A Timer of work on ``device``, of which it holds ``FLUSHED_BYTES``."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, call: Callable, times: int) -> list[float]:
        """GPU milliseconds of each call with a cold L2; the CPU runs ahead, as in a model."""
        with torch.cuda.device(self._flushed.device):
            events = [
                [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)
            ]
            for begin, end in events:
                self._flushed.zero_()
                begin.record()
                call()
                end.record()
            torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]


class Race(NamedTuple):
    """milliseconds: median of each contestant that ran. refused: what the others raised."""

    milliseconds: dict[str, float]
    refused: dict[str, str]


def race(
    calls: Mapping[str, Callable],
    timer: Timer,
    *,
    rounds: int = ROUNDS,
    rest: Callable[[float], None] = time.sleep,
) -> Race:
    """Let ``calls`` take turns, each after a pause.

    A GPU that meets its power limit under one of them would run the next one slower. The first call
    of each, which may build or warm up, is not counted.
    """
    counts, refused = {}, {}
    least, most = CALLS_PER_ROUND
    for name, call in calls.items():
        try:
            timer(call, 1)
            [first] = timer(call, 1)
        except (RuntimeError, ValueError) as error:  # out of memory, or a call that it can't do
            refused[name] = str(error).partition("\n")[0]
        else:
            counts[name] = max(least, min(most, int(ROUND_SECONDS * 1e3 / first)))
    taken: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(rounds):
        for name, count in counts.items():
            rest(PAUSE_SECONDS)
            taken[name] += timer(calls[name], count)
    return Race({name: statistics.median(times) for name, times in taken.items()}, refused)
