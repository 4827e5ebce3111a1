"""Calibrate, patch with max_error, sample: what is measured is found, promised and kept."""

import math
from functools import cache

import folder_paths
import pytest
import torch
from comfy.model_management import InterruptProcessingException
from comfy.patcher_extension import WrappersMP
from sageattention3.demo import sampling, tiny
from sageattention3.demo.families import FAMILIES
from sageattention3.demo.planted import planted_flux
from sageattention3.demo.sampling import EVERYTHING, SAMPLED, calibrated, last_run, patched
from sageattention3.kernels.metrics import compare
from sageattention3.nodes import calibrate, profiles
from sageattention3.nodes.calibrate import SageAttention3Calibrate, SageAttention3CalibrateGuider
from sageattention3.nodes.engine import profile_file
from sageattention3.nodes.engine.allowance import Allowance
from sageattention3.nodes.engine.budget import choose, keep_worst
from sageattention3.nodes.engine.calibration import Calibration
from sageattention3.nodes.engine.profile import ProfileError
from sageattention3.nodes.profiles import SageAttention3LoadProfile, SageAttention3SaveProfile
from sageattention3.nodes.widgets import check_choices

pytestmark = pytest.mark.host

STEPS = 4


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))
    monkeypatch.setattr(folder_paths, "user_directory", str(tmp_path / "user"))


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch):
    """Every call is measured: how far an allowance of time reaches, the clock would decide."""

    def unlimited(precisions, *, emulation):
        return Calibration(precisions, emulation=emulation, allowance=Allowance(math.inf))

    monkeypatch.setattr(calibrate, "Calibration", unlimited)


@pytest.fixture(scope="module")
def tiny_model():
    return cache(tiny.model)


def run(model, family, name="tiny", **settings):
    """(profile, chart, report, latent) of the node on the inputs of ``sampling.sample``."""
    widgets = {
        "seed": 0,
        "steps": STEPS,
        "cfg": 1.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1.0,
        "max_error": 0.05,
        "emulation": True,
    }
    out = SageAttention3Calibrate().calibrate(
        model,
        positive=tiny.conditioning(family, 1),
        negative=tiny.conditioning(family, 2),
        latent_image={"samples": torch.zeros(1, *FAMILIES[family].latent)},
        name=name,
        **{**widgets, **settings},
    )
    return out["result"]


def sample(model, family):
    return sampling.sample(model, family, steps=STEPS)


# --- what a budget promises ----------------------------------------------------------------------


@pytest.mark.parametrize("family", SAMPLED)
def test_a_latent_is_no_further_away_than_was_foretold(family, tiny_model):
    model = tiny_model(family)
    profile, *_ = run(model, family)
    plain = sample(model, family)

    everywhere = keep_worst(profile, "fp4", 0)
    found = compare(sample(patched(model, precision="fp4"), family), plain).rel_l1
    assert found <= 1.3 * everywhere.error

    budget = everywhere.error / 2
    choice = choose(profile, budget)
    assert choice.error <= budget * (1 + 1e-5)
    within = patched(model, profile=profile, max_error=budget)
    found = compare(sample(within, family), plain).rel_l1
    assert 0 < found <= 1.3 * choice.error
    ran = {
        entry.layer: entry.precision for entry in last_run(within).counts if inside(entry, choice)
    }
    assert ran == choice.precisions


def inside(entry, choice):
    return choice.first <= entry.step < STEPS - choice.last


# --- a layer that is hard to quantise ------------------------------------------------------------

LAYERS = ["double.0", "double.1", "single.0", "single.1", "single.2"]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_planted_layer_is_found_first_with_and_without_a_reference(layer, tiny_model):
    model = planted_flux(layer)
    profile, _, report, latent = run(model, "flux")
    unplanted = sample(tiny_model("flux"), "flux")
    assert compare(latent["samples"], unplanted).rel_l1 < 1e-3, "the same function"
    assert keep_worst(profile, "fp4", 1).layers_in("fp16") == [layer]
    assert profile.rank_by_predictors()[0] == layer
    assert f"(fp16_layers: {layer})" in report


# Those that weigh enough in the tiny model to be most of its error.
@pytest.mark.parametrize("layer", ["double.0", "double.1"])
def test_keeping_a_planted_layer_in_fp16_cuts_the_error_to_a_third(layer):
    model = planted_flux(layer)
    profile, *_, latent = run(model, "flux")

    def error(**settings):
        latent_of = sample(patched(model, **settings), "flux")
        return compare(latent_of, latent["samples"]).rel_l1

    everywhere = error(precision="fp4")
    assert everywhere >= 3 * error(precision="fp4", fp16_layers=layer)
    # The budget of a third comes to the same exception by itself, with nothing but fp4 to choose.
    assert choose(profile, everywhere / 3, ("fp4",)).precisions[layer] == "fp16"
    assert error(profile=profile, max_error=everywhere / 3) <= everywhere / 3


# --- the node ------------------------------------------------------------------------------------


def test_a_calibration_samples_what_full_precision_does_and_saves_what_it_found(tiny_model):
    model = tiny_model("flux")
    profile, chart, report, latent = run(patched(model, precision="fp4"), "flux", "my tiny flux")
    assert torch.equal(latent["samples"], sample(model, "flux"))
    assert chart.ndim == 4
    assert report.startswith("Fastest within max_error 0.05: ")
    assert profile.origin.shape == FAMILIES["flux"].latent
    assert profile.steps_done == profile.steps == STEPS
    assert profiles.names() == ["my tiny flux"]
    loaded = profiles.load_named("my tiny flux")
    assert loaded.layers == profile.layers
    assert torch.equal(loaded.errors["fp4"]["cosine"], profile.errors["fp4"]["cosine"])


def test_a_guiders_calibration_is_that_of_its_model(tiny_model):
    from comfy_extras.nodes_custom_sampler import BasicGuider, KSamplerSelect, RandomNoise

    model = tiny_model("flux")
    sigmas = model.get_model_object("model_sampling").sigmas
    sigmas = torch.linspace(float(sigmas[-1]), 0, STEPS + 1)
    out = SageAttention3CalibrateGuider().calibrate(
        RandomNoise.execute(0)[0],
        BasicGuider.execute(model, tiny.conditioning("flux"))[0],
        KSamplerSelect.execute("euler")[0],
        sigmas,
        {"samples": torch.zeros(1, *FAMILIES["flux"].latent)},
        name="guided",
        max_error=0.05,
        emulation=True,
    )
    profile, *_ = out["result"]
    assert profile.steps_done == STEPS
    assert torch.equal(profile.sigmas, sigmas)
    assert set(profile.layers) == {"double.0", "double.1", "single.0", "single.1", "single.2"}
    assert profiles.names() == ["guided"]


def test_an_interrupt_keeps_what_was_measured_beside_the_last_whole_profile(
    tiny_model, monkeypatch
):
    model = tiny_model("flux")
    run(model, "flux", "kept")
    whole = profiles.path_of("kept").read_bytes()

    def stop(step, *_):
        if step == 1:
            raise InterruptProcessingException

    monkeypatch.setattr("latent_preview.prepare_callback", lambda *_, **__: stop)
    with pytest.raises(InterruptProcessingException):
        run(model, "flux", "kept")
    assert profiles.names() == ["kept", "kept (partial)"]
    assert profiles.path_of("kept").read_bytes() == whole
    part = profiles.load_named("kept (partial)")
    assert (part.steps_done, part.steps) == (2, STEPS)
    assert part.errors["fp4"]["rel_l1"][:, :2].isfinite().all()
    assert part.errors["fp4"]["rel_l1"][:, 2:].isnan().all()
    [text] = SageAttention3LoadProfile().load("kept (partial)", 0.05)["ui"]["text"]
    assert f"interrupted after 2 of {STEPS} steps" in text
    patched(model, profile=part)


def test_what_cannot_be_measured_here_is_an_error_that_says_why(tiny_model):
    with pytest.raises(ProfileError, match="switch emulation on"):
        run(tiny_model("flux"), "flux", emulation=False)
    assert profiles.names() == []


def test_a_host_without_wrappers_around_predictions_is_named(tiny_model, monkeypatch):
    monkeypatch.delattr(WrappersMP, "PREDICT_NOISE")
    with pytest.raises(RuntimeError, match=r"Update ComfyUI to version 0\.3\.60"):
        run(tiny_model("flux"), "flux")


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a\\b", ".hidden", "none", "x" * 200, "a\nb"])
def test_a_name_that_is_no_file_name_is_refused_before_the_run(name, tiny_model):
    assert "can't be the name of a profile" in SageAttention3Calibrate.VALIDATE_INPUTS(name)
    assert "can't be the name of a profile" in SageAttention3SaveProfile.VALIDATE_INPUTS(name)
    with pytest.raises(ProfileError, match="can't be the name of a profile"):
        run(tiny_model("flux"), "flux", name)


# --- profiles by name ----------------------------------------------------------------------------


@pytest.fixture
def saved(tiny_model):
    profile, *_ = run(tiny_model("flux"), "flux", "flux tiny")
    return profile


def test_the_patch_takes_a_profile_by_name_as_it_takes_a_connected_one(saved, tiny_model):
    assert "flux tiny" in nodes_menu("profile_name")
    by_name = patched(tiny_model("flux"), profile_name="flux tiny", max_error=0.01)
    connected = patched(tiny_model("flux"), profile=saved, max_error=0.01)
    assert torch.equal(sample(by_name, "flux"), sample(connected, "flux"))
    assert last_run(by_name).title == "flux, max_error 0.01"
    [note] = last_run(by_name).notes
    assert note.startswith("Fastest within max_error 0.01: ")
    with pytest.raises(ProfileError, match="two profiles"):
        patched(tiny_model("flux"), profile_name="flux tiny", profile=saved)


def nodes_menu(widget):
    from sageattention3.nodes.patch import SageAttention3Patch

    return SageAttention3Patch.INPUT_TYPES()["optional"][widget][0]


@pytest.mark.usefixtures("saved")
def test_a_profile_of_another_model_is_an_error_at_the_node(tiny_model):
    for other in (tiny_model("sd3"), tiny.model("flux", seed=1)):
        with pytest.raises(ProfileError, match=r"measured on another model \(a flux\)"):
            patched(other, profile_name="flux tiny")


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("name", ["gone", "../flux tiny", "x" * 10_000])
def test_a_name_without_a_profile_is_refused_before_the_run_with_those_there_are(name):
    text = check_choices(profile_name=name)
    assert text.startswith("profile_name: ")
    assert len(text) < 600
    if name == "gone":
        assert "Saved profiles: flux tiny" in text
    assert SageAttention3LoadProfile.VALIDATE_INPUTS(name) == text.removeprefix("profile_name: ")


def test_saving_again_under_another_name_makes_the_same_file(saved):
    SageAttention3SaveProfile().save(saved, "copy")
    assert profiles.names() == ["copy", "flux tiny"]
    first, second = (profiles.path_of(name).read_bytes() for name in profiles.names())
    assert first == second


def test_a_node_runs_again_when_the_file_has_changed(saved):
    from sageattention3.nodes.patch import SageAttention3Patch

    before = SageAttention3Patch.IS_CHANGED(profile_name="flux tiny")
    assert before == SageAttention3LoadProfile.IS_CHANGED("flux tiny", max_error=0.1)
    profile_file.save(saved, profiles.path_of("flux tiny"))
    assert SageAttention3Patch.IS_CHANGED(profile_name="flux tiny") != before
    assert SageAttention3Patch.IS_CHANGED(**EVERYTHING) == SageAttention3Patch.IS_CHANGED()


def test_a_model_that_torch_compile_was_put_on_is_measured_all_the_same(tiny_model):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    model = tiny_model("flux").clone()
    set_torch_compile_wrapper(model, backend="eager")
    profile, *_ = run(model, "flux")
    assert len(profile.layers) == 5


def test_compiled_code_keeps_to_the_choice(tiny_model):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    profile, _ = calibrated(tiny_model("flux"), "flux", steps=STEPS)
    model = patched(tiny_model("flux"), profile=profile, max_error=0.005)
    eager = sample(model, "flux")
    choice = choose(profile, 0.005)
    assert len(set(choice.precisions.values())) > 1
    set_torch_compile_wrapper(model, backend="eager")
    assert compare(sample(model, "flux"), eager).rel_l1 < 1e-5
    ran = {
        entry.layer: entry.precision for entry in last_run(model).compiled if inside(entry, choice)
    }
    assert ran == choice.precisions
