"""What the strip of layers on a patching node shows: ``web/js/layer_strip.js`` draws it."""

from collections.abc import Mapping
from typing import Any

from .families import LayerCall
from .layout import Layout
from .plan import Plan


def layer_strip(
    plan: Plan, layout: Layout, fp16_layers: str, errors: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Plain values for the frontend; empty if the model's layers are not known beforehand.

    fp16_layers: the widget's text that ``plan`` was made of. errors: layer id -> measured relative
    L1. A layer's ``kept`` says what holds it in fp16 and is empty if nothing does.
    """
    if not layout.known:
        return []
    layers = [
        {"id": layer.id, "stack": block.stack, "kept": _kept(plan, layer)}
        | ({"error": errors[layer.id]} if layer.id in errors else {})
        for block in layout.all_blocks
        for layer in block.layers
    ]
    # The host wants lists, and joins those of several runs of a node.
    return [{"fp16_layers": fp16_layers, "layers": layers}]


def _kept(plan: Plan, layer: LayerCall) -> str:
    if layer.id in plan.edge_layers:
        return f"preset {plan.preset}"
    if layer.id in plan.fp16_layers:
        return "fp16_layers"
    if layer.is_cross and plan.cross_attention == "fp16":
        return "cross_attention"
    if all(layer.id in plan.inaccurate.get(precision, ()) for precision in plan.precisions):
        return "profile"
    return ""
