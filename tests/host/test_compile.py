"""torch.compile traces through the override: few graphs, the same result, an honest report."""

from itertools import pairwise

import pytest
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from sageattention3.demo import sampling, tiny
from sageattention3.demo.sampling import last_run, patched
from sageattention3.nodes.engine.override import find_session
from sageattention3.nodes.engine.summary import describe_runs
from torch._dynamo.testing import CompileCounter

pytestmark = [pytest.mark.host, pytest.mark.slow]

STEPS = 20
# Of tiny Flux: 2 double blocks and 3 single ones.
BLOCKS = [
    *(f"diffusion_model.double_blocks.{i}" for i in range(2)),
    *(f"diffusion_model.single_blocks.{i}" for i in range(3)),
]


@pytest.fixture(scope="module")
def flux():
    return tiny.model("flux")


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, *, keys=("diffusion_model",)):
    """``model`` as ComfyUI's compile node returns it, and the counter of its graphs."""
    counter = CompileCounter()
    model = model.clone()
    set_torch_compile_wrapper(model, backend=counter, fullgraph=True, keys=list(keys))
    return model, counter


def test_a_compiled_model_is_one_graph_and_bit_equal_to_the_eager_one(flux):
    model = patched(flux)
    eager = sampling.sample(model, "flux", steps=3)
    fast, counter = compiled(model)
    assert torch.equal(sampling.sample(fast, "flux", steps=3), eager)
    assert counter.frame_count == 1


def test_a_window_costs_one_more_graph_over_twenty_steps(flux):
    model = patched(flux, start_percent=0.2, end_percent=0.6)
    fast, counter = compiled(model)
    sampling.sample(fast, "flux", steps=STEPS)
    assert counter.frame_count == 2
    precisions = [last_run(model).cells()["double.0", step].precision for step in range(STEPS)]
    assert set(precisions) == {"fp16", "int8"}
    switches = sum(a != b for a, b in pairwise(precisions))
    assert switches == 2


def test_layer_exceptions_cost_no_graph_when_the_whole_model_is_compiled(flux):
    fast, counter = compiled(patched(flux, fp16_layers="double.0, single.-1"))
    sampling.sample(fast, "flux", steps=2)
    assert counter.frame_count == 1
    kept = {entry.layer for entry in last_run(fast).compiled if entry.precision == "fp16"}
    assert kept == {"double.0", "single.2"}


def test_blocks_compiled_one_by_one_share_a_graph_per_kind(flux):
    model = patched(flux)
    eager = sampling.sample(model, "flux", steps=2)
    fast, counter = compiled(model, keys=BLOCKS)
    assert torch.equal(sampling.sample(fast, "flux", steps=2), eager)
    assert counter.frame_count == 2  # double, single: as many as without a patch


def test_blocks_compiled_one_by_one_share_a_graph_per_decision(flux):
    model = patched(flux, fp16_layers="double.0, single.0")
    eager = sampling.sample(model, "flux", steps=2)
    fast, counter = compiled(model, keys=BLOCKS)
    assert torch.equal(sampling.sample(fast, "flux", steps=2), eager)
    assert counter.frame_count == 4  # double and single, each kept and quantised
    run = last_run(fast)
    assert {entry.layer for entry in run.compiled if entry.precision == "int8"} == {
        "double.1",
        "single.1",
        "single.2",
    }


@pytest.mark.parametrize("family", ["wan_t2v", "sd15", "lumina2"])
def test_models_without_block_hooks_or_with_cross_attention_compile_whole(family):
    model = patched(tiny.model(family), cross_attention="fp16")
    eager = sampling.sample(model, family, steps=2)
    fast, counter = compiled(model)
    assert torch.equal(sampling.sample(fast, family, steps=2), eager)
    assert counter.frame_count == 1
    expected = {entry.precision for entry in find_session(model).ledger.runs[0].counts}
    assert {entry.precision for entry in last_run(model).compiled} == expected


def test_a_second_run_of_compiled_code_is_reported_though_nothing_is_traced(flux):
    fast, counter = compiled(patched(flux))
    sampling.sample(fast, "flux", steps=2)
    sampling.sample(fast, "flux", steps=2)
    assert counter.frame_count == 1
    first, second = find_session(fast).ledger.take_unreported().runs
    assert first.compiled == second.compiled
    assert second.compiled_forwards == 2
    assert second.calls == 0
    assert " ".join(describe_runs([second]).split()).startswith(
        "2 forward passes ran code compiled by torch.compile, where single calls cannot be "
        "counted: int8 (reference emulation)"
    )


def test_a_model_that_is_no_longer_compiled_is_counted_again(flux):
    model = patched(flux)
    sampling.sample(compiled(model)[0], "flux", steps=1)
    sampling.sample(model, "flux", steps=1)
    run = last_run(model)
    assert (run.calls, run.compiled_forwards) == (5, 0)


def test_plans_on_one_model_do_not_share_compiled_decisions(flux):
    outs = {}
    for precision in ("fp16", "int8", "fp4"):
        model = patched(flux, precision=precision)
        outs[precision] = sampling.sample(compiled(model)[0], "flux", steps=1)
        assert torch.equal(outs[precision], sampling.sample(model, "flux", steps=1))
    assert not torch.equal(outs["int8"], outs["fp4"])


def test_a_model_that_another_node_compiled_before_the_patch_keeps_its_layer_names(flux):
    model = flux.clone()
    network = model.get_model_object("diffusion_model")
    model.add_object_patch("diffusion_model", torch.compile(network, backend="eager"))
    session = find_session(patched(model, fp16_layers="double.0"))
    assert session.layout.family == "flux"
