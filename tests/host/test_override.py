"""Patched tiny models of every family, run by the host's own code."""

from functools import cache

import comfy.ldm.modules.attention
import pytest
import torch
from sageattention3.demo import sampling, tiny
from sageattention3.demo.families import FAMILIES
from sageattention3.demo.sampling import last_run, patched
from sageattention3.nodes.engine.override import OPTION, find_session

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def tiny_model():
    """The tiny model of a family by name, built once; no test changes it."""
    return cache(tiny.model)


def counted(model, calls):
    """Put a pass-through override on top of ``model``'s that appends to ``calls``."""
    model = model.clone()
    inner = model.model_options["transformer_options"][OPTION]

    def count(func, *args, **kwargs):
        calls.append(func)
        return inner(func, *args, **kwargs)

    model.model_options["transformer_options"][OPTION] = count
    return model


@pytest.fixture
def flux(tiny_model):
    return tiny_model("flux")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_fp16_plan_is_bit_equal_to_the_host_and_sees_every_layer(tiny_model, family):
    model = tiny_model(family)
    plan_is_fp16 = patched(model, precision="fp16")
    assert torch.equal(sampling.forward(plan_is_fp16, family), sampling.forward(model, family))
    assert set(last_run(plan_is_fp16).layers()) >= set(find_session(plan_is_fp16).expected_layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_attention_call_of_a_quantised_model_is_accounted_for(tiny_model, family):
    model = patched(tiny_model(family))
    calls = []
    out = sampling.forward(counted(model, calls), family)
    run = last_run(model)
    assert out.isfinite().all()
    assert len(calls) == run.calls > 0
    wanted = "fp16" if family == "svd" else "int8"  # Stable Video Diffusion asks for float32
    assert {entry.precision for entry in run.counts} == {wanted}
    assert not any(entry.layer in ("other", "outside") for entry in run.counts)


@pytest.mark.parametrize("family", ["flux", "wan_t2v", "hunyuan_video", "sd3", "ltxv", "sd15"])
def test_int8_stays_close_to_the_host(tiny_model, family):
    model = tiny_model(family)
    reference = sampling.forward(model, family)
    out = sampling.forward(patched(model), family)
    assert not torch.equal(out, reference)
    assert (out - reference).abs().sum() / reference.abs().sum() < 0.02


def test_all_layers_excepted_is_bit_equal_to_the_host_and_none_is_all_quantised(flux):
    reference = sampling.forward(flux, "flux")
    everything = patched(flux, precision="fp4", fp16_layers="*")
    assert torch.equal(sampling.forward(everything, "flux"), reference)
    nothing = patched(flux, precision="fp4", fp16_layers="")
    sampling.forward(nothing, "flux")
    assert {entry.precision for entry in last_run(nothing).counts} == {"fp4"}


def test_named_layers_stay_with_the_host_and_no_others(flux):
    model = patched(flux, fp16_layers="double.0, single.-1")
    sampling.forward(model, "flux")
    kept = {entry.layer for entry in last_run(model).counts if entry.precision == "fp16"}
    assert kept == {"double.0", "single.2"}


# --- runs, steps and windows ---------------------------------------------------------------------


def test_samplers_with_two_calls_per_step_fill_the_same_steps_and_window(flux):
    window = {"start_percent": 0.25, "end_percent": 0.75}
    euler, heun = patched(flux, **window), patched(flux, **window)
    sampling.sample(euler, "flux", steps=4)
    sampling.sample(heun, "flux", steps=4, sampler="heun")
    once, twice = last_run(euler), last_run(heun)
    assert (once.forwards, twice.forwards) == (4, 7)
    assert once.steps == twice.steps == 4
    assert once.cells().keys() == twice.cells().keys()
    for cell, entry in once.cells().items():
        assert twice.cells()[cell].precision == entry.precision
    quantised = {entry.step for entry in once.counts if entry.precision == "int8"}
    assert 0 < len(quantised) < 4


def test_a_partial_denoise_decides_by_sigma_and_not_by_its_own_first_call(flux):
    model = patched(flux, start_percent=0.0, end_percent=0.5)
    sampling.sample(model, "flux", steps=4)
    first_half = {entry.step: entry.precision for entry in last_run(model).counts}
    assert set(first_half.values()) == {"int8", "fp16"}
    sampling.sample(model, "flux", steps=2, denoise=0.4)
    assert {entry.precision for entry in last_run(model).counts} == {"fp16"}


def test_a_split_sampler_gives_two_runs_that_together_cover_the_window(flux):
    whole, split = patched(flux, end_percent=0.5), patched(flux, end_percent=0.5)
    sampling.sample(whole, "flux", steps=4)
    sampling.sample(split, "flux", steps=4, last_step=2, force_full_denoise=False)
    sampling.sample(split, "flux", steps=4, start_step=2)
    by_step = {entry.step: entry.precision for entry in last_run(whole).counts}
    runs = find_session(split).ledger.take_unreported().runs
    assert [run.steps for run in runs] == [2, 2]
    halves = [{entry.step: entry.precision for entry in run.counts} for run in runs]
    assert [half[step] for half in halves for step in (0, 1)] == [by_step[i] for i in range(4)]


def test_guidance_counts_conditional_and_unconditional_calls_alike(tiny_model):
    model = patched(tiny_model("wan_t2v"))
    calls = []
    sampling.sample(counted(model, calls), "wan_t2v", steps=2, cfg=4.0)
    assert last_run(model).calls == len(calls) == last_run(model).forwards * 4


def test_a_model_that_is_used_again_starts_a_fresh_run(flux):
    model = patched(flux)
    sampling.sample(model, "flux", steps=1)
    sampling.sample(model, "flux", steps=1)
    first, second = find_session(model).ledger.take_unreported().runs
    assert first.counts == second.counts
    assert first.calls == 5


def test_a_run_ends_with_one_line_in_the_log(flux, caplog):
    model = patched(flux)
    with caplog.at_level("INFO", logger="sageattention3"):
        sampling.sample(model, "flux", steps=2)
    [record] = caplog.records
    assert record.getMessage() == (
        "flux, preset custom: All 10 attention calls ran in int8 (reference emulation)"
    )


def test_a_run_in_which_nothing_could_be_quantised_ends_with_a_warning(flux, caplog):
    model = patched(flux, emulation=False)
    with caplog.at_level("INFO", logger="sageattention3"):
        sampling.sample(model, "flux", steps=1)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "stayed with the host: " in record.getMessage()
    assert "no native int8 kernel fits this call" in record.getMessage()


# --- nothing left behind -------------------------------------------------------------------------


def test_two_patches_of_one_model_are_independent(flux):
    reference = sampling.forward(flux, "flux")
    alone = {p: sampling.forward(patched(flux, precision=p), "flux") for p in ("int8", "fp4")}
    a, b = patched(flux, precision="int8"), patched(flux, precision="fp4")
    for _ in range(2):
        assert torch.equal(sampling.forward(a, "flux"), alone["int8"])
        assert torch.equal(sampling.forward(flux, "flux"), reference)
        assert torch.equal(sampling.forward(b, "flux"), alone["fp4"])
    assert {entry.precision for entry in last_run(a).counts} == {"int8"}
    assert {entry.precision for entry in last_run(b).counts} == {"fp4"}
    assert find_session(flux) is None


def test_a_second_patch_replaces_the_first(flux):
    twice = patched(patched(flux, precision="fp4"), precision="int8")
    once = patched(flux, precision="int8")
    assert torch.equal(sampling.forward(twice, "flux"), sampling.forward(once, "flux"))
    assert last_run(twice).calls == 5
    for kind in ("wrappers", "callbacks"):
        number = {
            event: {key: len(functions) for key, functions in keys.items()}
            for event, keys in getattr(twice, kind).items()
        }
        assert number == {
            event: dict.fromkeys(keys, 1) for event, keys in getattr(once, kind).items()
        }


def test_a_copy_made_further_down_the_graph_shares_the_session(flux):
    model = patched(flux)
    copy = model.clone().clone()
    sampling.sample(copy, "flux", steps=1)
    assert find_session(copy) is find_session(model)
    assert last_run(model).calls == 5


def test_the_model_that_came_in_keeps_no_trace(flux):
    before = repr(flux.model_options)
    modules = {name: dict(vars(module)) for name, module in flux.model.named_modules()}
    functions = dict(vars(comfy.ldm.modules.attention))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    reference = sampling.sample(flux, "flux", steps=2)

    sampling.sample(patched(flux, precision="fp4"), "flux", steps=2)

    assert torch.equal(sampling.sample(flux, "flux", steps=2), reference)
    assert repr(flux.model_options) == before
    assert not flux.wrappers
    assert not flux.callbacks
    assert dict(vars(comfy.ldm.modules.attention)) == functions
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    for name, module in flux.model.named_modules():
        assert vars(module).keys() - {"current_patcher"} == modules[name].keys() - {
            "current_patcher"
        }


def test_an_interrupted_run_leaves_nothing_and_the_next_one_is_whole(flux):
    class Interrupt(BaseException):
        pass

    model = patched(flux)
    reference = sampling.sample(model, "flux", steps=2)

    def stop(step, *_):
        raise Interrupt

    with pytest.raises(Interrupt):
        sampling.sample(model, "flux", steps=2, callback=stop)
    stopped = last_run(model)
    assert stopped.calls == 5
    assert torch.equal(sampling.sample(model, "flux", steps=2), reference)
    assert last_run(model) is not stopped
    assert last_run(model).calls == 10
