"""Watches how the tracker names the attention calls of a model that the host runs."""

from collections.abc import Callable
from typing import Any

import torch
from sageattention3.nodes.engine.layers import LayerCall, LayerTracker
from sageattention3.nodes.engine.layout import Layout, describe_model


class Watch:
    """A patched clone of ``model``, and the calls that it made: those of checkpoints apart."""

    def __init__(self, model: Any, decide: Callable | None = None) -> None:
        from comfy.patcher_extension import WrappersMP

        self.layout: Layout = describe_model(model.model.diffusion_model)
        self.tracker = LayerTracker(self.layout)
        self.decide = decide
        self.calls: list[LayerCall] = []
        self.lengths: list[tuple[int, int]] = []
        self.recomputed: list[LayerCall] = []
        self.model = model.clone()
        options = self.model.model_options["transformer_options"]
        options["optimized_attention_override"] = self._override()
        self.model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "watch", self._wrapper())

    @property
    def ids(self) -> list[str]:
        return [call.id for call in self.calls]

    def _override(self) -> Callable:
        def override(func, q, k, v, heads, *args, **kwargs):
            axis = 2 if kwargs.get("skip_reshape") else 1
            lengths = q.shape[axis], k.shape[axis]
            call = self.tracker.identify(kwargs["transformer_options"], *lengths)
            if torch._C._current_graph_task_id() != -1:
                self.recomputed.append(call)
            else:
                self.calls.append(call)
                self.lengths.append(lengths)
            return func(q, k, v, heads, *args, **kwargs)

        return override

    def _wrapper(self) -> Callable:
        def wrapper(executor, x, t, c_concat, c_crossattn, control, options, **conditions):
            given = [name for name, value in conditions.items() if value is not None]
            options = self.tracker.begin_forward(options, given, self.decide)
            return executor(x, t, c_concat, c_crossattn, control, options, **conditions)

        return wrapper
