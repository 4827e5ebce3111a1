"""What a calibration has seen so far, as it comes in."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from ...kernels.metrics import Errors
from .families import LayerCall
from .measure import Predictors

Group = tuple[str, str]  # stack and role of layers: those of a group weigh alike in the result
UNET = ("input", "middle", "output")  # parts of one stack, each too small to be probed by itself


class Cell(NamedTuple):
    """One layer at one step."""

    layer: str
    step: int


def group_of(layer: LayerCall) -> Group:
    stack = layer.id.partition(".")[0]
    return "unet" if stack in UNET else stack, layer.role


def _lists() -> defaultdict:
    return defaultdict(list)


def _dicts() -> defaultdict:
    return defaultdict(dict)


@dataclass
class Record:
    """What a run has shown so far; an interrupt loses nothing of it.

    errors: precision -> cell -> one entry per measured call. predictors: one entry per measured
    call. moved: (group, step) -> mean absolute change of the denoised latent per relative L1 of one
    layer's error. seconds: precision -> layer -> fastest call. calls: layer -> calls in the run.
    tokens: layer -> queries and keys of its last call. groups: in order of the first call.
    refusals: precision -> layers that can't be measured in it, and why. sigmas: the run's schedule.
    progress: each step's start on the host's schedule, in percent / 100. size: mean absolute value
    of the last denoised latent.
    """

    errors: dict[str, dict[Cell, list[Errors]]] = field(default_factory=lambda: defaultdict(_lists))
    predictors: dict[Cell, list[Predictors]] = field(default_factory=_lists)
    moved: dict[tuple[Group, int], list[float]] = field(default_factory=_lists)
    seconds: dict[str, dict[str, float]] = field(default_factory=_dicts)
    calls: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    refusals: dict[str, dict[str, str]] = field(default_factory=_dicts)
    sigmas: list[float] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    steps_done: int = 0
    size: float = math.nan
