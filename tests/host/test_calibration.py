"""A calibration watches a sampling of the host, changes nothing and keeps within its time."""

import math

import pytest
import torch
from comfy.model_management import InterruptProcessingException
from sageattention3.demo import sampling, tiny
from sageattention3.demo.sampling import patched
from sageattention3.nodes.engine.allowance import Allowance
from sageattention3.nodes.engine.calibration import Calibration
from sageattention3.nodes.engine.layout import describe_model
from sageattention3.nodes.engine.watch import watch_model

pytestmark = pytest.mark.host

PRECISIONS = ("fp4", "int8_fp4", "int8")


def calibrate(model, family, limit=math.inf, calibration=None, **settings):
    """(latent, record) of a watched sampling; every call measured unless there is a limit."""
    calibration = calibration or Calibration(PRECISIONS, emulation=True, allowance=Allowance(limit))
    layout = describe_model(model.model.diffusion_model)
    watched = watch_model(model, calibration, layout)
    return sampling.sample(watched, family, **settings), calibration.record


@pytest.mark.parametrize("family", ["flux", "wan_t2v", "ltxv", "sd15", "hunyuan_video"])
def test_a_watched_sampling_gives_the_same_latent_and_measures_every_layer(family):
    model = tiny.model(family)
    plain = sampling.sample(model, family, steps=2)
    latent, record = calibrate(model, family, steps=2)
    assert torch.equal(latent, plain)
    layers = set(describe_model(model.model.diffusion_model).layer_ids)
    assert set(record.groups) == layers
    for precision in PRECISIONS:
        assert {cell.layer for cell in record.errors[precision]} == layers
        assert {cell.step for cell in record.errors[precision]} == {0, 1}
    assert set(record.predictors) == set(record.errors["fp4"])
    assert record.progress == pytest.approx([0, 0.5], abs=0.01)
    errors = {
        p: [e.rel_l1 for found in record.errors[p].values() for e in found] for p in PRECISIONS
    }
    assert max(errors["int8"]) < min(errors["fp4"])


def test_a_patch_of_ours_is_taken_off_while_calibrating():
    model = tiny.model("flux")
    latent, _ = calibrate(patched(model, precision="fp4"), "flux")
    assert torch.equal(latent, sampling.sample(model, "flux"))


def test_what_was_measured_before_an_interrupt_is_kept():
    def stop(step, *_):
        if step == 1:
            raise InterruptProcessingException

    allowance = Allowance(math.inf)  # on two steps of a tiny model a limit leaves room for little
    calibration = Calibration(PRECISIONS, emulation=True, allowance=allowance)
    with pytest.raises(InterruptProcessingException):
        calibrate(tiny.model("flux"), "flux", calibration=calibration, steps=4, callback=stop)
    record = calibration.record
    assert record.steps_done == 2
    assert len(record.sigmas) == 5
    assert record.errors["fp4"]
    assert record.moved


def test_a_calibration_keeps_within_its_allowance_and_still_sees_every_layer():
    model = tiny.model("wan_t2v")
    allowance = Allowance()
    calibration = Calibration(PRECISIONS, emulation=True, allowance=allowance)
    _, record = calibrate(model, "wan_t2v", calibration=calibration, steps=12)
    assert allowance.plain + allowance.extra <= 2.5 * allowance.plain
    assert {cell.layer for cell in record.errors["int8"]} == set(record.groups)
    assert {group for group, _ in record.moved} == set(record.groups.values())
