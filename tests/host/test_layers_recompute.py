"""Gradient checkpointing calls attention again during backward: stable names are right then too."""

from collections import Counter

import pytest
import torch
from sageattention3.demo import tiny

from .watching import Watch

pytestmark = pytest.mark.host

HOOKED = ["flux", "chroma", "hunyuan_video", "qwen_image", "wan_t2v", "wan_i2v", "sd3", "mochi"]
COUNTED = ["lumina2", "hidream", "sd15", "cosmos_predict2"]


def checkpoint(module: torch.nn.Module) -> None:
    """Recompute ``module`` in backward, as the host's training node does."""
    forward = module.forward

    def recomputing(*args, **kwargs):
        return torch.utils.checkpoint.checkpoint(
            lambda a, k: forward(*a, **k), args, kwargs, use_reentrant=False
        )

    module.forward = recomputing


def train(family: str, modules=None) -> Watch:
    """One forward and backward pass. modules: which to checkpoint; None: those the host would."""
    from comfy_extras.nodes_train import find_all_highest_child_module_with_forward

    watched = Watch(tiny.model(family))
    network = watched.model.model.diffusion_model.requires_grad_(True)
    highest = find_all_highest_child_module_with_forward(network)
    for module in modules(network) if modules else highest:
        checkpoint(module)
    x, conditions = tiny.inputs(family)
    options = {
        **watched.model.model_options["transformer_options"],
        "wrappers": watched.model.wrappers,
        "sigmas": torch.tensor([0.5]),
    }
    out = watched.model.model.apply_model(
        x, torch.full((len(x),), 0.5), transformer_options=options, **conditions
    )
    out.square().mean().backward()
    return watched


@pytest.mark.parametrize("family", HOOKED)
def test_recomputed_blocks_keep_their_names(family):
    watched = train(family)
    stable = [call for call in watched.calls if call.stable]
    assert {call.id for call in stable} == {
        layer.id for block in watched.layout.blocks for layer in block.layers
    }
    assert Counter(call for call in watched.recomputed if call.stable) == Counter(stable)


@pytest.mark.parametrize("family", ["wan_t2v", "wan_i2v"])
def test_attention_checkpointed_on_its_own_keeps_its_name_though_the_order_is_reversed(family):
    watched = train(
        family,
        lambda network: [
            part for block in network.blocks for part in (block.self_attn, block.cross_attn)
        ],
    )
    roles = [call.role for call in watched.recomputed]
    assert roles.index("self") > 0  # it does come last
    assert Counter(watched.recomputed) == Counter(watched.calls)


def test_calls_outside_hooked_blocks_are_not_called_stable():
    watched = train("hunyuan_video")
    unstable = [call.id for call in watched.calls if not call.stable]
    assert unstable == ["refiner.0", "refiner.1"]
    assert Counter(call.stable for call in watched.recomputed)[False] == 2


@pytest.mark.parametrize("family", COUNTED)
def test_counted_calls_are_never_called_stable(family):
    watched = train(family)
    assert tuple(watched.ids) == watched.layout.layer_ids
    assert not any(call.stable for call in watched.calls + watched.recomputed)
    assert len(watched.recomputed) == len(watched.calls)
