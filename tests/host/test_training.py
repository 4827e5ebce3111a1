"""The host's LoRA training runs through a patched model, with and without checkpointing."""

from functools import cache

import pytest
import torch
from sageattention3.demo import sampling, tiny
from sageattention3.demo.sampling import last_run, patched
from sageattention3.nodes.engine.ledger import HOST
from sageattention3.nodes.engine.override import find_session

pytestmark = [pytest.mark.host, pytest.mark.slow]


@pytest.fixture(scope="module")
def tiny_model():
    """The tiny model of a family by name, built once; training leaves its weights alone."""
    return cache(tiny.model)


def updates(lora):
    """What two steps of SGD made of the matrices that start at zero: the sum of their gradients."""
    ups = [value.detach().float().flatten() for name, value in lora.items() if "lora_up" in name]
    return torch.cat(ups)


def trained(model, family, **settings):
    lora, losses = sampling.train(model, family, **settings)
    assert len(losses) == 2
    return updates(lora)


def attention_updates(lora):
    """Updates of the projections that attention's own gradients reach: a cut graph leaves zeros."""
    return {
        name: value.detach()
        for name, value in lora.items()
        if "lora_up" in name and ("qkv" in name or "to_q" in name or ".q." in name)
    }


# Without checkpointing the host trains only Wan (a limit of host 0.3.75, with or without us).
@pytest.mark.parametrize(
    ("family", "dtype", "gradient_checkpointing"),
    [
        ("wan_t2v", "fp32", False),
        ("wan_t2v", "fp32", True),
        ("flux", "bf16", True),
        ("hunyuan_video", "bf16", True),
        ("sd3", "bf16", True),
    ],
)
def test_int8_training_agrees_with_the_hosts_and_counts_each_call_once(
    tiny_model, family, dtype, gradient_checkpointing
):
    settings = {"dtype": dtype, "gradient_checkpointing": gradient_checkpointing}
    expected = trained(tiny_model(family), family, **settings)
    model = patched(tiny_model(family))
    update = trained(model, family, **settings)
    assert update.isfinite().all()
    assert torch.nn.functional.cosine_similarity(update, expected, dim=0) > 0.99
    run = last_run(model)
    assert run.forwards == 2
    assert run.calls == 2 * len(find_session(model).expected_layers)
    assert {entry.precision for entry in run.counts} == {"int8"}
    assert run.steps == 0


def test_checkpointing_changes_no_gradient(tiny_model):
    both = [
        trained(
            patched(tiny_model("wan_t2v"), cross_attention="fp16", fp16_layers="block.1"),
            "wan_t2v",
            dtype="fp32",
            gradient_checkpointing=checkpointing,
        )
        for checkpointing in (False, True)
    ]
    assert torch.equal(*both)


def test_attention_projections_are_trained_not_only_what_follows_them(tiny_model):
    lora, _ = sampling.train(patched(tiny_model("flux")), "flux")
    projections = attention_updates(lora)
    assert projections
    assert all(value.abs().sum() > 0 for value in projections.values())


def test_an_fp16_plan_trains_bit_equal_to_the_host(tiny_model):
    expected = trained(tiny_model("flux"), "flux")
    assert torch.equal(trained(patched(tiny_model("flux"), precision="fp16"), "flux"), expected)


def test_fp4_training_is_the_hosts_with_the_reason_and_a_way_out(tiny_model):
    expected = trained(tiny_model("flux"), "flux")
    model = patched(tiny_model("flux"), precision="fp4")
    assert torch.equal(trained(model, "flux"), expected)
    [reason] = {entry.reason for entry in last_run(model).counts}
    assert "int8 trains" in reason


def test_exceptions_hold_where_layers_are_certain_and_go_to_the_host_where_they_are_not(
    tiny_model,
):
    model = patched(tiny_model("hunyuan_video"), fp16_layers="double.0")
    trained(model, "hunyuan_video")
    outcome = {entry.layer: (entry.backend, entry.reason) for entry in last_run(model).counts}
    assert outcome["double.0"] == (HOST, "kept in fp16 by fp16_layers")
    assert {outcome[layer][0] for layer in ("double.1", "single.0", "single.1")} == {
        "reference emulation"
    }
    # The token refiner runs outside of the blocks: its recompute cannot be told from others.
    for layer in ("refiner.0", "refiner.1"):
        assert outcome[layer][0] == HOST
        assert "training cannot tell" in outcome[layer][1]


def test_sampling_after_training_is_a_run_of_its_own_and_quantised(tiny_model):
    model = patched(tiny_model("flux"), precision="fp4")
    sampling.train(model, "flux")
    sampling.sample(model, "flux", steps=1)
    training, sampled = find_session(model).ledger.take_unreported().runs
    assert {entry.precision for entry in training.counts} == {"fp16"}
    assert {entry.precision for entry in sampled.counts} == {"fp4"}
