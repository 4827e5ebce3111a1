"""Attention calls inside code made by ``torch.compile``: what it may read, and what it leaves."""

from .layers import LayerCall
from .layout import Layout
from .plan import Plan


class LayerClasses:
    """Layers of one stack and role that a plan treats alike, each class named by its first layer.

    Blocks of a class can share one compiled graph; blocks of two can not.
    """

    def __init__(self, layout: Layout, plan: Plan) -> None:
        self._first: dict[str, LayerCall] = {}  # layer id -> first of its class
        self._members: dict[str, list[str]] = {}  # id of the first -> ids of the class
        leaders: dict[tuple, LayerCall] = {}
        for block in layout.all_blocks:
            for layer in block.layers:
                treatment = (
                    block.stack,
                    layer.role,
                    layer.id in plan.fp16_layers,
                    layer.id in plan.edge_layers,
                    plan.by_layer.get(layer.id),
                )
                first = leaders.setdefault(treatment, layer)
                self._first[layer.id] = first
                self._members.setdefault(first.id, []).append(layer.id)

    def of_block(self, layers: tuple[LayerCall, ...]) -> tuple[LayerCall, ...]:
        """For each layer the one that stands for its class."""
        return tuple(self._first[layer.id] for layer in layers)

    def members(self, layer: str) -> list[str]:
        """All layers of the class that ``layer`` stands for."""
        return self._members.get(layer, [layer])


class CompiledCalls:
    """What compiled code ran since it was last asked.

    A compiled graph cannot count: a counter is state that dynamo would guard on, and recompile for
    at every change. Storing a constant attribute is an effect that it keeps, repeats each time the
    code runs, and never guards on. So every outcome is an attribute, named by its own description.
    """

    def mark(self, layer: str, precision: str, backend: str, reason: str, fallback: bool) -> None:
        """Called while dynamo traces; all arguments are constants of the trace."""
        name = "\t".join((layer, precision, backend, reason, "x" if fallback else ""))
        setattr(self, name.replace(".", "\n"), True)  # dynamo takes a dot for nesting

    def take(self) -> list[tuple[str, str, str, str, bool]]:
        """Arguments of the marks since the last call, each once, in order of the first."""
        marks = [name.replace("\n", ".").split("\t") for name in vars(self)]
        vars(self).clear()
        return [(*description, bool(fallback)) for *description, fallback in marks]
