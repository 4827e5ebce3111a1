"""The plan: which precision each layer should run in, and when the host should rather compute."""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from ...kernels import PRECISIONS
from .advice import explain_choice
from .budget import choose
from .families import LayerCall
from .layout import Layout
from .profile import Profile, ProfileError
from .selector import SelectorError, parse_selector
from .words import shorten

log = logging.getLogger("sageattention3")

FP16 = ("fp16",)
CROSS_ATTENTION = ("fp16", "same")


class PlanError(ValueError):
    """The widgets don't make a plan. The message says which one and what it may be."""


class Wanted(NamedTuple):
    """What the plan asks for one call: precisions, best first, and why if that is ``fp16``."""

    precisions: tuple[str, ...]
    reason: str


class Recipe(NamedTuple):
    """What a preset decides; the other widgets apply to every preset."""

    precisions: tuple[str, ...]
    edge_blocks: int  # this many first and last blocks stay in fp16
    start_percent: float
    end_percent: float


# First and last blocks stay in fp16 where a preset can afford it: the first feeds its error to all
# others, the last writes it straight into the prediction, where nothing can correct it. FP4 also
# leaves out the ends of sampling: the first steps fix the composition, the last ones fine detail.
# A GPU without FP4 units computes `speed` in int8 rather than not at all.
PRESETS: Mapping[str, Recipe] = MappingProxyType(
    {
        "balanced": Recipe(("int8",), edge_blocks=0, start_percent=0.0, end_percent=1.0),
        "quality": Recipe(("int8",), edge_blocks=1, start_percent=0.0, end_percent=1.0),
        "speed": Recipe(("fp4", "int8"), edge_blocks=1, start_percent=0.1, end_percent=0.9),
    }
)
CUSTOM = "custom"  # not a recipe: the widgets decide


@dataclass(frozen=True)
class Plan:
    """Made by :func:`make_plan`. Says what is wanted; what can be had, the kernels say."""

    precisions: tuple[str, ...]  # preference order
    fp16_layers: frozenset[str] = frozenset()
    start_percent: float = 0.0
    end_percent: float = 1.0
    cross_attention: str = "fp16"  # or "same" as the other layers
    min_tokens: int = 1024
    emulation: bool = False
    preset: str = CUSTOM
    edge_layers: frozenset[str] = frozenset()  # those of fp16_layers that the preset put there
    # layer -> precision that a profile's errors allow within max_error; takes the place of
    # precisions. A plain dict, since torch.compile breaks its graph at a MappingProxyType.
    by_layer: Mapping[str, str] = field(default_factory=dict, hash=False)
    max_error: float | None = None  # None: no profile
    note: str = ""  # what a profile made of max_error, in words

    @property
    def per_layer(self) -> bool:
        """Whether layers of the same role may differ, so that the caller's id must be certain."""
        return bool(self.fp16_layers or self.by_layer)

    @property
    def title(self) -> str:
        return (
            f"preset {self.preset}" if self.max_error is None else f"max_error {self.max_error:g}"
        )

    def wanted(self, layer: LayerCall, in_window: bool, q_len: int, kv_len: int) -> Wanted:
        """What to compute one call in. ``in_window``: the step is within start..end_percent."""
        if self.precisions == FP16:
            return Wanted(FP16, "the plan is fp16")
        if not in_window:
            return Wanted(FP16, f"step outside {self.start_percent:g}..{self.end_percent:g}")
        if layer.id in self.fp16_layers:
            where = f"preset {self.preset}" if layer.id in self.edge_layers else "fp16_layers"
            return Wanted(FP16, f"kept in fp16 by {where}")
        if layer.is_cross and self.cross_attention == "fp16":
            return Wanted(FP16, "cross-attention kept in fp16")
        # A short side makes quantising cost more than it saves, and hurts: over few keys the mean
        # that smoothing subtracts is no longer a bias, and padding fills most of a block.
        if min(q_len, kv_len) < self.min_tokens:
            side = "queries" if q_len < kv_len else "keys"
            return Wanted(FP16, f"fewer than min_tokens={self.min_tokens} {side}")
        if self.max_error is None:
            return Wanted(self.precisions, "")
        precision = self.by_layer.get(layer.id)
        if precision is None:
            return Wanted(FP16, "the profile has no measurement of it")
        if precision == "fp16":
            return Wanted(FP16, f"kept in fp16 for max_error {self.max_error:g}")
        return Wanted((precision,), "")


def make_plan(
    layout: Layout,
    *,
    preset: str = "balanced",
    precision: str = "int8",
    fp16_layers: str = "",
    start_percent: float = 0.0,
    end_percent: float = 1.0,
    cross_attention: str = "fp16",
    min_tokens: int = 1024,
    emulation: bool = False,
    profile: Profile | None = None,
    max_error: float = 0.05,
    candidates: Collection[str] = tuple(PRECISIONS),
) -> Plan:
    """The plan for a model with ``layout``.

    precision, start_percent and end_percent count for the preset ``custom`` only; the other
    settings add to every preset. start and end are positions in the noise schedule, as in the
    host's nodes: 0 is its noisy end.

    A profile takes the place of the preset: of ``candidates``, each layer runs in what is fastest
    for a forecast error of the latent of at most ``max_error`` (relative L1).

    Raises PlanError for a bad setting, SelectorError if fp16_layers names no layer of the model,
    ProfileError if the profile does not fit the layout.
    """
    if preset == CUSTOM:
        recipe = Recipe((precision,), 0, start_percent, end_percent)
    elif preset in PRESETS:
        recipe = PRESETS[preset]
    else:
        raise PlanError(
            f"unknown preset `{shorten(preset)}`: choose {', '.join([*PRESETS, CUSTOM])}"
        )
    _check(recipe, cross_attention, min_tokens)
    edges = frozenset()
    if profile is None:
        edges = _edge_layers(layout, recipe.edge_blocks, preset)
    try:
        chosen = parse_selector(fp16_layers).resolve(layout)
    except SelectorError as error:
        raise SelectorError(f"fp16_layers: {error}") from None
    plan = Plan(
        precisions=recipe.precisions,
        fp16_layers=chosen | edges,
        start_percent=recipe.start_percent,
        end_percent=recipe.end_percent,
        cross_attention=cross_attention,
        min_tokens=min_tokens,
        emulation=emulation,
        preset=preset,
        edge_layers=edges - chosen,
    )
    if profile is None:
        return plan
    return _within_budget(plan, layout, profile, max_error, candidates)


def _check(recipe: Recipe, cross_attention: str, min_tokens: int) -> None:
    for precision in recipe.precisions:
        if precision not in PRECISIONS:
            raise PlanError(
                f"unknown precision `{shorten(precision)}`: choose {', '.join(PRECISIONS)}"
            )
    start, end = recipe.start_percent, recipe.end_percent
    for name, value in (("start_percent", start), ("end_percent", end)):
        if not (math.isfinite(value) and 0.0 <= value <= 1.0):
            raise PlanError(f"{name} is {value:g}: it must be between 0 and 1")
    if start >= end:
        raise PlanError(
            f"start_percent {start:g} is not below end_percent {end:g}: no step would be quantised"
        )
    if cross_attention not in CROSS_ATTENTION:
        raise PlanError(
            f"unknown cross_attention `{shorten(cross_attention)}`: "
            f"choose {' or '.join(CROSS_ATTENTION)}"
        )
    if min_tokens < 0:
        raise PlanError(f"min_tokens is {min_tokens}: it must be 0 or more")


def _edge_layers(layout: Layout, count: int, preset: str) -> frozenset[str]:
    if count and not layout.known:
        # The first call could be kept, but half a preset would pass for the whole one.
        log.warning(
            "preset %s keeps the first and last %d block(s) in fp16, but the architecture is %s "
            "and where it ends is not known: no layer is kept. Name layers in fp16_layers instead",
            preset,
            count,
            layout.family,
        )
    blocks = {*layout.blocks[:count], *layout.blocks[len(layout.blocks) - count :]}
    return frozenset(layer.id for block in blocks for layer in block.layers)


def _within_budget(
    plan: Plan, layout: Layout, profile: Profile, max_error: float, candidates: Collection[str]
) -> Plan:
    """``plan`` with the precisions that ``profile`` allows; its other gates stay."""
    strangers = {layer for layer in profile.layers if not layout.has(layer)}
    if strangers:
        raise ProfileError(
            "the profile measures layers that this model lacks "
            f"({', '.join(map(shorten, sorted(strangers)[:3]))}"
            f"{' ...' if len(strangers) > 3 else ''}); the model has {layout.summary()}. "
            "Choose a profile of this model, or none"
        )
    if not (math.isfinite(max_error) and max_error >= 0):
        raise PlanError(f"max_error is {max_error:g}: it must be 0 or more")
    crossing = {layer.id for block in layout.all_blocks for layer in block.layers if layer.is_cross}
    gated = set(plan.fp16_layers)
    for layer, (queries, keys) in zip(profile.layers, profile.tokens.tolist(), strict=True):
        crosses = layer in crossing if layout.known else queries != keys
        if (crosses and plan.cross_attention == "fp16") or min(queries, keys) < plan.min_tokens:
            gated.add(layer)
    choice = choose(profile, max_error, candidates, gated)
    return replace(
        plan,
        precisions=profile.precisions,
        start_percent=choice.start_percent,
        end_percent=choice.end_percent,
        by_layer=dict(choice.precisions),
        max_error=max_error,
        note=explain_choice(choice, profile, max_error),
    )
