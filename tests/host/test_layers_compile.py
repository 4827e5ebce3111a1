"""torch.compile over models whose calls are named: few graphs, and no new ones at later steps."""

from collections.abc import Callable

import pytest
import torch
from sageattention3.demo import sampling, tiny
from sageattention3.nodes.engine.layers import STATE_KEY, BlockState

from .watching import Watch

pytestmark = pytest.mark.host


class Graphs:
    """A backend that runs what dynamo traced as it is, and counts it."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list) -> Callable:
        self.count += 1
        return graph

    def compile(self, module: torch.nn.Module) -> torch.nn.Module:
        return torch.compile(module, backend=self)


def _override(tracker, use: Callable) -> Callable:
    """Like the pack's: multiplies q where ``use`` says so, a choice that changes the graph."""

    def override(func, q, k, v, heads, *args, **kwargs):
        axis = 2 if kwargs.get("skip_reshape") else 1
        chosen = use(tracker, kwargs["transformer_options"], q.shape[axis], k.shape[axis])
        return func(q * 2.0 if chosen else q, k, v, heads, *args, **kwargs)

    return override


def _by_id(tracker, options, q_len, kv_len):
    return tracker.identify(options, q_len, kv_len).id in ("double.0", "block.0.self", "block.1")


def _by_decision(tracker, options, q_len, kv_len):
    state = options[STATE_KEY]
    assert isinstance(state, BlockState)
    return state.decision[state.position(q_len, kv_len)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["flux", "hunyuan_video", "sd3", "sd15", "z_image"],
)
def test_a_whole_model_compiles_to_one_graph_and_gives_the_same_result(family):
    watched = Watch(tiny.model(family))
    override = _override(watched.tracker, _by_id)
    eager = sampling.forward(watched.model, family, optimized_attention_override=override)
    graphs = Graphs()
    base = watched.model.model
    base.diffusion_model = graphs.compile(base.diffusion_model)
    for sigma in (0.5, 0.4, 0.3):
        out = sampling.forward(watched.model, family, sigma, optimized_attention_override=override)
        assert graphs.count == 1
        if sigma == 0.5:
            torch.testing.assert_close(out, eager)


@pytest.mark.parametrize(
    ("family", "lists", "kinds"),
    [
        ("flux", ("double_blocks", "single_blocks"), 3),  # double.0 and double.1 decide differently
        ("wan_t2v", ("blocks",), 2),
        ("ltxv", ("transformer_blocks",), 2),
    ],
)
def test_blocks_compiled_one_by_one_share_a_graph_where_they_share_a_decision(family, lists, kinds):
    def first_in_its_stack(layers):
        return tuple(layer.id in ("double.0", "block.0.self") for layer in layers)

    watched = Watch(tiny.model(family), decide=first_in_its_stack)
    graphs = Graphs()
    for name in lists:
        blocks = getattr(watched.model.model.diffusion_model, name)
        for i, block in enumerate(blocks):
            blocks[i] = graphs.compile(block)
    override = _override(watched.tracker, _by_decision)
    for sigma in (0.5, 0.4):
        sampling.forward(watched.model, family, sigma, optimized_attention_override=override)
    assert graphs.count == kinds
