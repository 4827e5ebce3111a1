"""What a calibration measured of one model: the errors of its layers, their weight, their time."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from .fingerprint import Fingerprint, fingerprint
from .measure import Predictors
from .record import Cell, Record
from .words import shorten

TYPE = "SAGE3_PROFILE"  # in graphs
METRICS = ("rel_l1", "cosine", "worst_row_rel_l1")  # of ``kernels.metrics.Errors``
# Channel outliers are what block scales lose; the other predictors tell two such layers apart.
BY_PREDICTORS = "outlier_ratio"


class ProfileError(ValueError):
    """No profile, one that can't be read, or another model's. The message says what to do."""


def require_profile(value: object) -> "Profile":
    """``value`` as it came to a node's profile input. Raises ProfileError if it is no Profile."""
    if isinstance(value, Profile):
        return value
    raise ProfileError(
        f"profile is {shorten(repr(value))} ({type(value).__name__}), which is not a profile of "
        "measured errors. Connect SageAttention3 Calibrate or SageAttention3 Load Profile, or "
        "leave the input unconnected"
    )


@dataclass(frozen=True)
class Origin:
    """Where a profile comes from.

    shape: of the latent without batch. gpu: its name, "CPU" without one.
    """

    family: str
    fingerprint: Fingerprint
    shape: tuple[int, ...]
    gpu: str
    pack_version: str


@dataclass(frozen=True, eq=False)
class Profile:
    """Measurements of one sampling run of S steps over L layers; NaN where nothing was measured.

    layers: ids, in order of the first call. sigmas: [S + 1]. progress: [S], each step's start on
    the host's schedule, 0..1. steps_done: fewer than S in a run that was interrupted. size: mean
    absolute value of the last denoised latent. errors: precision -> metric (of METRICS) -> [L, S],
    of the layer's attention against full precision. moved: [L, S], mean absolute change of the
    denoised latent per relative L1 of the layer's error. predictors: name -> [L, S]. seconds:
    precision -> [L], of one call. calls: [L], per step. tokens: [L, 2], queries and keys. All
    tensors are float32.
    """

    origin: Origin
    layers: tuple[str, ...]
    sigmas: torch.Tensor
    progress: torch.Tensor
    steps_done: int
    size: float
    errors: Mapping[str, Mapping[str, torch.Tensor]]
    moved: torch.Tensor
    predictors: Mapping[str, torch.Tensor]
    seconds: Mapping[str, torch.Tensor]
    calls: torch.Tensor
    tokens: torch.Tensor

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those in which something was measured."""
        return tuple(self.errors)

    def check(self, model: object) -> None:
        """Raise ProfileError unless it was measured on ``model`` (a ModelPatcher)."""
        if not self.origin.fingerprint.matches(fingerprint(model)):
            raise ProfileError(
                f"the profile was measured on another model (a {shorten(self.origin.family)}): "
                "load that model, choose a profile of this one, or calibrate this one"
            )

    def rank_by_predictors(self) -> list[str]:
        """Layers from hardest to easiest to quantise, told without any full-precision output."""
        found = self.predictors[BY_PREDICTORS].nanmean(1).nan_to_num(-math.inf)
        return [self.layers[i] for i in found.argsort(descending=True, stable=True).tolist()]


def make_profile(record: Record, origin: Origin) -> Profile:
    """The profile of what ``record`` holds. Raises ProfileError if that is nothing."""
    layers = tuple(layer for layer in record.groups if layer in record.tokens)
    if not record.steps_done or not any(record.errors.values()):
        raise ProfileError(_nothing(record))
    steps = len(record.sigmas) - 1

    def table(values: Mapping[Cell, float]) -> torch.Tensor:
        rows = [[values.get(Cell(layer, i), math.nan) for i in range(steps)] for layer in layers]
        return torch.tensor(rows, dtype=torch.float32)

    errors = {}
    for precision, found in record.errors.items():
        errors[precision] = {
            metric: table(
                {cell: _mean(getattr(e, metric) for e in es) for cell, es in found.items()}
            )
            for metric in METRICS
        }
    predictors = {
        name: table(
            {cell: _mean(getattr(p, name) for p in ps) for cell, ps in record.predictors.items()}
        )
        for name in Predictors._fields
    }
    moved = {
        Cell(layer, step): _mean(values)
        for (group, step), values in record.moved.items()
        for layer in layers
        if record.groups[layer] == group
    }
    return Profile(
        origin=origin,
        layers=layers,
        sigmas=torch.tensor(record.sigmas),
        progress=torch.tensor(record.progress),
        steps_done=record.steps_done,
        size=record.size,
        errors=errors,
        moved=table(moved),
        predictors=predictors,
        seconds={
            precision: torch.tensor([known.get(layer, math.nan) for layer in layers])
            for precision, known in record.seconds.items()
        },
        calls=torch.tensor([record.calls[layer] / max(1, record.steps_done) for layer in layers]),
        tokens=torch.tensor([record.tokens[layer] for layer in layers], dtype=torch.float32),
    )


def _mean(values: Iterable[float]) -> float:
    """Infinite where a value is not a number: an error that has no size is beyond all bounds."""
    found = list(values)
    mean = sum(found) / len(found)
    return math.inf if math.isnan(mean) else mean


def _nothing(record: Record) -> str:
    reasons = dict.fromkeys(r for refused in record.refusals.values() for r in refused.values())
    if reasons:
        shown = "; ".join(map(shorten, list(reasons)[:3]))
        return (
            f"nothing could be measured: {shown}. Where this machine has no kernel for a "
            "precision, switch emulation on"
        )
    if not record.groups:
        return (
            "nothing could be measured: no attention call of this model was seen. It uses its own "
            "attention, or the sampler ran no step (denoise 0)"
        )
    return "nothing was measured before the run ended: calibrate with more steps"
