"""Where in the sampling a model call stands, told from its sigma and never from a call counter.

Samplers call the model once, twice or three times per step, start in the middle of a schedule, or
share one schedule between two models; the sigma is right in all of these.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class SigmaWindow(NamedTuple):
    """Sigmas of the part of sampling in which a plan may quantise; both ends belong to it."""

    first: float  # noise level at start_percent: the high end
    last: float

    def contains(self, sigma: float) -> bool:
        return self.last <= sigma <= self.first


def sigma_window(model_sampling: Any, start_percent: float, end_percent: float) -> SigmaWindow:
    """The window from ``start_percent`` to ``end_percent`` on the host's schedule of a model.

    0 and 1 stand for no limit: a sampler may start above the schedule's first sigma.
    """
    return SigmaWindow(
        float(model_sampling.percent_to_sigma(start_percent)) if start_percent > 0 else math.inf,
        float(model_sampling.percent_to_sigma(end_percent)) if end_percent < 1 else -math.inf,
    )


def step_of(sigma: float, schedule: Sequence[float]) -> int:
    """0-based step of ``schedule`` (steps + 1 sigmas, rising or falling) that ``sigma`` lies in.

    A sigma of the schedule belongs to the step that starts there, one between two of them to the
    step from the first to the second; the last sigma and whatever lies outside, to the nearest.
    """
    last_step = len(schedule) - 2
    if last_step <= 0:
        return 0
    nearest = min(range(len(schedule)), key=lambda i: abs(schedule[i] - sigma))
    if abs(schedule[nearest] - sigma) <= 1e-4 * abs(sigma):  # rounding of the host's casts
        return min(nearest, last_step)
    for step in range(last_step + 1):
        low, high = sorted(schedule[step : step + 2])
        if low < sigma < high:
            return step
    return min(nearest, last_step)


def position(sigma: float, options: dict) -> tuple[int, int]:
    """(step, number of steps) of a forward pass with these transformer_options.

    Training has no schedule: one step of none.
    """
    schedule = options.get("sample_sigmas")
    if schedule is None or torch.is_grad_enabled():
        return 0, 0
    schedule = schedule.tolist()
    return step_of(sigma, schedule), len(schedule) - 1


def percent_of(model_sampling: Any, sigma: float) -> float:
    """The percent (0 to 1) at which the host's schedule of a model has ``sigma``.

    The host offers only the way back, which falls with the percent: halving finds it.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if float(model_sampling.percent_to_sigma(middle)) > sigma:
            low = middle
        else:
            high = middle
    return high
