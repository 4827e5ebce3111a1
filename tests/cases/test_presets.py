"""Exceptions and windows that must take effect, on the layers and steps that the creator named."""

import pytest
import torch
from sageattention3.demo import sampling, tiny
from sageattention3.demo.sampling import last_run, patched
from sageattention3.nodes.engine.selector import SelectorError

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def models():
    return {family: tiny.model(family) for family in ("flux", "wan_t2v", "sd15")}


def kept_in_fp16(model):
    return {entry.layer for entry in last_run(model).counts if entry.precision == "fp16"}


@pytest.mark.parametrize(
    ("family", "text", "kept"),
    [
        ("wan_t2v", "0", {"block.0.self", "block.0.cross"}),
        ("wan_t2v", "0, 0, 0-0", {"block.0.self", "block.0.cross"}),
        ("wan_t2v", "-1", {"block.1.self", "block.1.cross"}),
        ("wan_t2v", "*.cross", {"block.0.cross", "block.1.cross"}),
        ("flux", "double.0", {"double.0"}),
        ("flux", "single.0", {"single.0"}),
        ("flux", "first 1, last 1", {"double.0", "single.2"}),
        ("sd15", "input.1.0.self", {"input.1.0.self"}),
        ("flux", "", set()),
    ],
)
def test_exactly_the_named_layers_stay_in_fp16(models, family, text, kept):
    """QA-45: blocks without an index, and double and single blocks that share their numbers."""
    model = patched(models[family], fp16_layers=text)
    sampling.sample(model, family, steps=1)
    assert kept_in_fp16(model) == kept


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("flux", "0"),
        ("flux", "double.2"),
        ("flux", "double.0-9"),
        ("flux", "double.-3"),
        ("wan_t2v", "99"),
        ("sd15", "double.0"),
        ("flux", "last 9"),
    ],
)
def test_a_name_that_the_model_lacks_is_an_error_at_the_node(models, family, text):
    """QA-45: an exception out of range was accepted and did nothing."""
    with pytest.raises(SelectorError) as caught:
        patched(models[family], fp16_layers=text)
    assert text.split(",")[0].strip() in str(caught.value)


@pytest.mark.parametrize("family", ["flux", "wan_t2v", "sd15"])
def test_no_exception_is_all_quantised_and_all_exceptions_are_bit_equal_to_the_host(models, family):
    """QA-45: the two ends of every list of exceptions."""
    plain = sampling.sample(models[family], family)
    everything = patched(models[family])
    assert not torch.equal(sampling.sample(everything, family), plain)
    assert kept_in_fp16(everything) == set()
    nothing = patched(models[family], fp16_layers="*")
    assert torch.equal(sampling.sample(nothing, family), plain)


@pytest.mark.parametrize("sampler", ["euler", "heun", "res_multistep"])
@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_the_window_follows_the_noise_whatever_the_sampler_and_guidance(models, sampler, cfg):
    """QA-45: samplers that call twice per step, and guidance, moved a window that counts calls."""
    model = patched(models["wan_t2v"], start_percent=0.5)
    sampling.sample(model, "wan_t2v", steps=4, sampler=sampler, cfg=cfg)
    run = last_run(model)
    quantised = {entry.step for entry in run.counts if entry.precision == "int8"}
    left = {entry.step for entry in run.counts if entry.precision == "fp16"}
    assert quantised
    assert left
    assert max(left) <= min(quantised), "the noisy part first"


def test_a_partial_denoise_is_in_the_window_of_its_noise_and_not_of_its_count(models):
    """QA-45: starting at step 6 of 8 is the end of sampling, not its beginning."""
    model = patched(models["wan_t2v"], start_percent=0.5)
    sampling.sample(model, "wan_t2v", steps=8, start_step=6, force_full_denoise=True)
    assert {entry.precision for entry in last_run(model).counts} == {"int8"}


def test_split_samplers_cover_the_window_together(models):
    """QA-45: a high-noise and a low-noise sampler see one schedule in two runs."""

    def quantised_steps(**part):
        model = patched(models["wan_t2v"], start_percent=0.3, end_percent=0.8)
        sampling.sample(model, "wan_t2v", steps=8, **part)
        return {entry.step for entry in last_run(model).counts if entry.precision == "int8"}

    first, second = quantised_steps(last_step=4), quantised_steps(start_step=4)
    assert first
    assert second
    assert quantised_steps() == first | {step + 4 for step in second}
