"""What the strip of layers on a patching node shows: ``web/js/layer_strip.js`` draws it."""

import math
from typing import Any

from .families import LayerCall
from .layout import Layout
from .plan import Plan
from .profile import Profile


def layer_strip(
    plan: Plan, layout: Layout, fp16_layers: str, profile: Profile | None = None
) -> list[dict[str, Any]]:
    """Plain values for the frontend; empty if the model's layers are not known beforehand.

    fp16_layers: the widget's text that ``plan`` was made of. A layer's ``kept`` says what holds it
    in fp16 and is empty if nothing does; its ``error`` is the measured one, where it is known.
    """
    if not layout.known:
        return []
    measured, errors = _errors(profile)
    layers = [
        {
            "id": layer.id,
            "stack": block.stack,
            "kept": _kept(plan, layer),
            "precision": plan.by_layer.get(layer.id, plan.precisions[0]),
            **({"error": errors[layer.id]} if layer.id in errors else {}),
        }
        for block in layout.all_blocks
        for layer in block.layers
    ]
    # The host wants lists, and joins those of several runs of a node.
    return [{"fp16_layers": fp16_layers, "measured": measured, "layers": layers}]


def _errors(profile: Profile | None) -> tuple[str, dict[str, float]]:
    """The hardest precision that was measured, and each layer's relative L1 in it."""
    if profile is None:
        return "", {}
    means = {name: table["rel_l1"].nanmean(1) for name, table in profile.errors.items()}
    hardest = max(means, key=lambda name: means[name].nanmean().nan_to_num(0.0).item())
    errors = zip(profile.layers, means[hardest].tolist(), strict=True)
    return hardest, {layer: error for layer, error in errors if not math.isnan(error)}


def _kept(plan: Plan, layer: LayerCall) -> str:
    if layer.id in plan.edge_layers:
        return f"preset {plan.preset}"
    if layer.id in plan.fp16_layers:
        return "fp16_layers"
    if layer.is_cross and plan.cross_attention == "fp16":
        return "cross_attention"
    if plan.max_error is not None and plan.by_layer.get(layer.id, "fp16") == "fp16":
        return f"max_error {plan.max_error:g}"
    return "precision" if plan.precisions[0] == "fp16" else ""
