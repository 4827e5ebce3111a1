"""How long the attention of known models takes here in each precision, and what to make of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ...kernels import PRECISIONS, Capability, attention
from ...kernels.shapes import IMAGE_MODELS, VIDEO_MODELS, Shape
from ...kernels.timing import Race, Timer, race
from .plan import PRESETS

HOST = "fp16"  # the precision that stands for the host's own attention
MENU: Mapping[str, Sequence[Shape]] = {
    "image models": IMAGE_MODELS,
    "video models": VIDEO_MODELS,
    "all": (*IMAGE_MODELS, *VIDEO_MODELS),
    **{shape.name: (shape,) for shape in (*IMAGE_MODELS, *VIDEO_MODELS)},
}
# A gain below this is not worth an error: attention is a part of a step only, and timing wavers.
WORTH_IT = 1.05
JUDGED = ("balanced", "speed")  # mildest first; quality computes as balanced does, in fewer layers


class Speed(NamedTuple):
    """One shape: milliseconds per precision that ran, and why the others did not."""

    shape: Shape
    race: Race

    def gain(self, precision: str) -> float | None:
        """How many times as fast as the host; None where one of the two did not run."""
        taken = self.race.milliseconds
        return taken[HOST] / taken[precision] if {HOST, precision} <= taken.keys() else None


def native_precisions(capabilities: Sequence[Capability]) -> list[str]:
    """Those that run natively on a device with these ``capabilities``, mildest first."""
    usable = {row.precision for row in capabilities if row.native and row.usable}
    return [precision for precision in PRECISIONS if precision in usable]


def why_nothing_native(capabilities: Sequence[Capability]) -> str:
    """What the native backends hold against a device, each reason once."""
    reasons = (row.reason for row in capabilities if row.native)
    return "; ".join(dict.fromkeys(reasons)) or "this version has no native kernels"


def measure_shape(
    shape: Shape,
    qkv: Sequence[torch.Tensor],
    precisions: Sequence[str],
    host: Callable,
    timer: Timer,
    rounds: int,
) -> Speed:
    """Time ``host(q, k, v)`` and the pack's own attention in ``precisions``, in turns."""
    calls = {HOST: partial(host, *qkv)}
    calls |= {each: partial(attention, *qkv, precision=each) for each in precisions}
    return Speed(shape, race(calls, timer, rounds=rounds))


def advise(speeds: Sequence[Speed], precisions: Sequence[str]) -> str:
    """One sentence: which preset to use here, from what was measured."""
    gains = {preset: _gains(speeds, preset, precisions) for preset in JUDGED}
    if not any(gains.values()):
        return "Nothing could be compared with ComfyUI's own attention: the reasons stand below."
    useful = {preset: by_shape for preset, by_shape in gains.items() if _fast(by_shape)}
    if not useful:
        return (
            "Leave SageAttention3 off for speed: at no measured shape was it at least "
            f"{WORTH_IT:g} times as fast as ComfyUI's own attention."
        )
    best = next(iter(useful))  # a stronger preset has to be worth its larger error
    for preset, by_shape in useful.items():
        if _mean(by_shape) >= WORTH_IT * _mean(useful[best]):
            best = preset
    fast = _fast(useful[best])
    slow = {name: gain for name, gain in useful[best].items() if name not in fast}
    sentence = (
        f"Use preset {best} here: {_precision_of(best, precisions)} computes attention faster than "
        f"ComfyUI's own ({_listed(fast)})"
    )
    return f"{sentence}; leave it off for {_listed(slow)}." if slow else f"{sentence}."


def _precision_of(preset: str, precisions: Sequence[str]) -> str | None:
    """What ``preset`` computes in: the first of its choices that this GPU has."""
    return next((each for each in PRESETS[preset].precisions if each in precisions), None)


def _gains(speeds: Sequence[Speed], preset: str, precisions: Sequence[str]) -> dict[str, float]:
    precision = _precision_of(preset, precisions)
    gains = {speed.shape.name: speed.gain(precision) for speed in speeds} if precision else {}
    return {name: gain for name, gain in gains.items() if gain is not None}


def _fast(gains: Mapping[str, float]) -> dict[str, float]:
    return {name: gain for name, gain in gains.items() if gain >= WORTH_IT}


def _listed(gains: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {gain:.2f}x" for name, gain in gains.items())


def _mean(gains: Mapping[str, float]) -> float:
    """Geometric, as of ratios."""
    return math.exp(sum(map(math.log, gains.values())) / len(gains))


def speed_table(speeds: Sequence[Speed], precisions: Sequence[str]) -> str:
    """Milliseconds of one call, aligned; what did not run is told below."""
    rows = [("model", "tokens", "ComfyUI", *precisions)]
    for speed in speeds:
        cells = [_cell(speed, precision) for precision in (HOST, *precisions)]
        rows.append((speed.shape.name, f"{speed.shape.tokens:,}", *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    refusals = [
        f"{speed.shape.name}, {'ComfyUI' if name == HOST else name}: {reason}"
        for speed in speeds
        for name, reason in speed.race.refused.items()
    ]
    return "\n".join(["Milliseconds of one attention call:", *lines, *refusals])


def _cell(speed: Speed, precision: str) -> str:
    taken = speed.race.milliseconds.get(precision)
    if taken is None:
        return "-"
    gain = speed.gain(precision)
    times = f" ({gain:.2f}x)" if precision != HOST and gain is not None else ""
    return f"{taken:.3g}{times}" if taken < 100 else f"{taken:.0f}{times}"
