"""The nodes as the host calls them: widgets, checks before a run, reports after it."""

import asyncio
from functools import cache
from pathlib import Path

import comfy.ldm.modules.attention
import execution
import folder_paths
import pytest
import torch
from comfy.model_management import InterruptProcessingException
from PIL import Image
from sageattention3.demo import sampling, tiny
from sageattention3.demo.sampling import EVERYTHING, patched
from sageattention3.kernels import PRECISIONS
from sageattention3.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from sageattention3.nodes.engine.ledger import HOST, RUNS_KEPT
from sageattention3.nodes.engine.override import OPTION, find_session
from sageattention3.nodes.engine.profile import ProfileError
from sageattention3.nodes.engine.selector import SelectorError
from sageattention3.nodes.engine.summary import REPEATED
from sageattention3.nodes.load_diffusion_model import SageAttention3LoadDiffusionModel
from sageattention3.nodes.patch import SageAttention3Patch
from sageattention3.nodes.report import SageAttention3Report
from sageattention3.nodes.widgets import PLAN_WIDGETS, check_choices

import nodes

pytestmark = pytest.mark.host

PLAN = [
    "preset",
    "precision",
    "fp16_layers",
    "start_percent",
    "end_percent",
    "cross_attention",
    "min_tokens",
    "emulation",
    "enabled",
]


@pytest.fixture(scope="module")
def tiny_model():
    """The tiny model of a family by name, built once; no test changes it."""
    return cache(tiny.model)


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))


@pytest.fixture
def registered(monkeypatch):
    for name, node in NODE_CLASS_MAPPINGS.items():
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, name, node)


def report(model, samples=None):
    out = SageAttention3Report().report([samples or {"samples": torch.zeros(1)}], [model])
    return out["result"][1], out


# --- widgets -------------------------------------------------------------------------------------


def test_node_ids_and_names_are_those_that_workflows_store():
    assert NODE_DISPLAY_NAME_MAPPINGS == {
        "SageAttention3Patch": "SageAttention3 Patch",
        "SageAttention3LoadDiffusionModel": "Load Diffusion Model (SageAttention3)",
        "SageAttention3Report": "SageAttention3 Report",
        "SageAttention3Calibrate": "SageAttention3 Calibrate",
        "SageAttention3CalibrateGuider": "SageAttention3 Calibrate (guider)",
        "SageAttention3LoadProfile": "SageAttention3 Load Profile",
        "SageAttention3SaveProfile": "SageAttention3 Save Profile",
        "SageAttention3Compare": "SageAttention3 Compare",
        "SageAttention3Benchmark": "SageAttention3 Benchmark",
    }


def test_widgets_stand_in_the_order_in_which_workflows_store_their_values():
    assert list(SageAttention3Patch.INPUT_TYPES()["required"]) == ["model", *PLAN]
    assert list(SageAttention3LoadDiffusionModel.INPUT_TYPES()["required"]) == [
        "unet_name",
        "weight_dtype",
        *PLAN,
    ]
    for node in (SageAttention3Patch, SageAttention3LoadDiffusionModel):
        # Later than these, or workflows of earlier versions would put values in the wrong place.
        assert list(node.INPUT_TYPES()["optional"]) == ["profile", "max_error", "profile_name"]
    assert list(SageAttention3Report.INPUT_TYPES()["required"]) == ["samples", "model"]


def test_every_widget_explains_itself_and_every_precision_is_on_the_menu():
    for node in NODE_CLASS_MAPPINGS.values():
        for name, (_, *options) in node.INPUT_TYPES()["required"].items():
            if name not in ("unet_name", "weight_dtype"):  # the host's own
                assert len(options[0]["tooltip"]) > 20, name
    assert set(PLAN_WIDGETS["precision"][0]) == set(PRECISIONS)


# --- before a run --------------------------------------------------------------------------------


def prompt(**changes):
    widgets = {name: PLAN_WIDGETS[name][1]["default"] for name in PLAN}
    loader = {"unet_name": tiny.checkpoint("sd3").name, "weight_dtype": "default"}
    inputs = {**loader, **widgets, **changes}
    return {"1": {"class_type": "SageAttention3LoadDiffusionModel", "inputs": inputs}}


def validated(graph):
    """(valid, text of the errors), by the host's own check of a queued prompt."""
    valid, errors, _ = asyncio.run(execution.validate_inputs("prompt", graph, "1", {}))
    return valid, " ".join(f"{error['message']} {error['details']}" for error in errors)


@pytest.fixture
def models_folder(monkeypatch):
    folder = tiny.checkpoint("sd3").parent
    entry = ([str(folder)], {".safetensors"})
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", entry)


@pytest.mark.usefixtures("registered", "models_folder")
def test_the_defaults_pass_the_hosts_check():
    assert validated(prompt()) == (True, "")


@pytest.mark.usefixtures("registered", "models_folder")
@pytest.mark.parametrize(
    ("widget", "value"),
    [("preset", "ultra"), ("precision", "int2"), ("cross_attention", "fp8")],
)
def test_a_menu_value_of_another_version_is_refused_with_what_there_is(widget, value):
    valid, text = validated(prompt(**{widget: value}))
    assert not valid
    assert f"{widget} is '{value}', which this version does not have. Choose " in text
    assert str(PLAN_WIDGETS[widget][0][0]) in text


@pytest.mark.usefixtures("registered", "models_folder")
@pytest.mark.parametrize("value", ["x", 5, {}, [[1, 2]]])
def test_a_profile_input_that_holds_no_profile_is_refused_before_the_run(value):
    valid, text = validated(prompt(profile=value))
    assert not valid
    assert "not a profile of measured errors" in text
    assert "leave the input unconnected" in text


def test_a_profile_that_another_node_delivers_is_checked_at_the_patch(tiny_model):
    with pytest.raises(ProfileError, match="not a profile of measured errors"):
        patched(tiny_model("flux"), profile="x")


@pytest.mark.usefixtures("registered", "models_folder")
def test_numbers_out_of_range_are_still_the_hosts_to_refuse():
    valid, text = validated(prompt(start_percent=1.5))
    assert not valid
    assert "start_percent" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp16_layers": "triple.0"}, "triple"),
        ({"fp16_layers": "double.7"}, "double.7"),
        ({"fp16_layers": "double.0-"}, "double.0-"),
        ({"preset": "ultra"}, "ultra"),
        ({"preset": "custom", "start_percent": 0.9, "end_percent": 0.1}, "start_percent"),
    ],
)
def test_settings_that_do_not_fit_the_model_stop_at_the_node(tiny_model, settings, message):
    with pytest.raises(ValueError, match=message):
        patched(tiny_model("flux"), **settings)


@pytest.mark.parametrize("text", ["double.7", "double.x", "double", "first 0", "!", "double.3-1"])
def test_an_error_about_layers_names_the_widget(tiny_model, text):
    with pytest.raises(SelectorError, match=r"^fp16_layers: `"):
        patched(tiny_model("flux"), fp16_layers=text)


@pytest.mark.parametrize("setting", ["preset", "precision", "cross_attention", "fp16_layers"])
def test_an_error_quotes_no_more_than_a_dialog_shows(tiny_model, setting):
    with pytest.raises(ValueError, match="xxx") as error:
        patched(tiny_model("flux"), **{setting: "x" * 1_000_000})
    assert len(str(error.value)) < 600
    if setting != "fp16_layers":
        assert len(check_choices(**{setting: "x" * 1_000_000})) < 300


def test_a_host_without_overrides_is_named_with_the_version_it_takes(tiny_model, monkeypatch):
    monkeypatch.delattr(comfy.ldm.modules.attention, "wrap_attn")
    with pytest.raises(RuntimeError, match=r"Update ComfyUI to version 0\.3\.60"):
        patched(tiny_model("flux"))


def test_a_disabled_node_passes_the_very_model_through(tiny_model):
    model = tiny_model("flux")
    assert patched(model, enabled=False, fp16_layers="nonsense") is model


@pytest.mark.usefixtures("models_folder")
def test_the_loader_loads_as_the_hosts_loader_and_patches():
    name = tiny.checkpoint("sd3").name
    settings = {**EVERYTHING, "precision": "fp16"}
    (ours,) = SageAttention3LoadDiffusionModel().load(name, "default", **settings)["result"]
    (hosts,) = nodes.UNETLoader().load_unet(name, "default")
    assert find_session(ours) is not None
    assert torch.equal(
        sampling.sample(ours, "sd3", steps=1), sampling.sample(hosts, "sd3", steps=1)
    )


# --- after a run ---------------------------------------------------------------------------------


def test_a_report_passes_the_samples_and_shows_text_and_picture(tiny_model, tmp_path):
    model = patched(tiny_model("flux"), fp16_layers="double.0")
    samples = {"samples": sampling.sample(model, "flux", steps=2)}
    text, out = report(model, samples)
    [passed], _, image = out["result"]
    assert passed is samples
    assert " ".join(text.split()).startswith(
        "8 of 10 attention calls ran in int8 (reference emulation); "
        "2 stayed with the host: kept in fp16 by fp16_layers flux"
    )
    assert out["ui"]["text"] == (text,)
    [shown] = out["ui"]["images"]
    with Image.open(Path(tmp_path, shown["subfolder"], shown["filename"])) as png:
        assert (png.height, png.width) == image.shape[1:3]


def test_two_samplers_on_one_model_are_two_runs_in_one_report(tiny_model):
    model = patched(tiny_model("flux"))
    sampling.sample(model, "flux", steps=1)
    sampling.sample(model, "flux", steps=2)
    text, out = report(model)
    assert "Run 1 of 2: All 5" in text
    assert "Run 2 of 2: All 10" in text
    assert out["result"][2].shape[0] == 2
    assert len(out["ui"]["images"]) == 2


def test_a_report_without_a_new_run_says_so_first_and_shows_the_last_one(tiny_model):
    model = patched(tiny_model("flux"))
    sampling.sample(model, "flux", steps=1)
    first, new = report(model)
    again, old = report(model)
    assert again == f"{REPEATED}\n\n{first}"
    assert flags(new) == {(False, False)}
    assert flags(old) == {(True, False)}
    sampling.sample(model, "flux", steps=1)
    assert report(model)[0] == first


def flags(out):
    """(repeated, interrupted) of the rows for API clients."""
    return {(row["repeated"], row["interrupted"]) for rows in out["ui"]["ledger"] for row in rows}


def stop(error, at):
    """A sampler's callback that raises at the end of a step, as the host does when interrupted."""

    def callback(step, *_):
        if step == at:
            raise error

    return callback


@pytest.mark.parametrize("error", [InterruptProcessingException, RuntimeError])
@pytest.mark.parametrize(("at", "says"), [(1, "step 2 of 3"), (2, "step 3 of 3")])
def test_a_run_that_was_broken_off_says_where(tiny_model, error, at, says):
    model = patched(tiny_model("flux"))
    with pytest.raises(error):
        sampling.sample(model, "flux", steps=3, callback=stop(error(), at))
    sampling.sample(model, "flux", steps=1)
    text, out = report(model)
    assert text.startswith(f"Run 1 of 2: Interrupted at {says}. All {5 * (at + 1)} attention calls")
    assert "\n\nRun 2 of 2: All 5 attention calls" in text
    assert [{row["interrupted"] for row in rows} for rows in out["ui"]["ledger"]] == [
        {True},
        {False},
    ]


def test_a_run_after_another_nodes_error_was_not_broken_off(tiny_model):
    model = patched(tiny_model("flux"))
    try:
        raise ValueError("another node, which then samples all the same")
    except ValueError:
        sampling.sample(model, "flux", steps=1)
    assert "nterrupted" not in report(model)[0]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("items", [3, RUNS_KEPT + 8])
def test_a_list_of_latents_is_one_report_of_each_run_once(tiny_model, items):
    model = patched(tiny_model("flux"))
    session = find_session(model)
    for _ in range(items):
        session.begin_run()
        session.ledger.record("double.0", "fp16", HOST, "the plan is fp16", False)
        session.end_run()
    latents = [{"samples": torch.full((1,), float(i))} for i in range(items)]
    # As the host runs a node; async, since some of its own nodes are.
    [output, ui, *_] = asyncio.run(
        execution.get_output_data(
            "prompt", "1", SageAttention3Report(), {"samples": latents, "model": [model]}
        )
    )
    assert output[0] == latents
    assert len(output[1]) == len(output[2]) == 1
    kept = min(items, RUNS_KEPT)
    assert len(ui["ledger"]) == len(ui["images"]) == kept
    [text] = ui["text"]
    assert f"Run {items} of {items}: " in text
    assert text.startswith(
        "Run 1 of 3" if items == 3 else f"Not shown: the first 8 runs of {items}"
    )


def test_a_list_of_models_is_one_report_of_each_model(tiny_model):
    first, second = (patched(tiny_model("flux"), precision=p) for p in ("int8", "fp16"))
    for model in (first, second):
        sampling.sample(model, "flux", steps=1)
    out = SageAttention3Report().report([{}, {}, {}], [first, second.clone(), second])
    text = out["result"][1]
    assert "ran in int8" in text
    assert text.count("stayed with the host: the plan is fp16") == 1
    assert len(out["ui"]["ledger"]) == 2


def test_reports_of_what_did_not_happen_say_what_to_do(tiny_model):
    unpatched, _ = report(tiny_model("flux"))
    assert unpatched.startswith("This model is not patched")
    unsampled, _ = report(patched(tiny_model("flux")))
    assert unsampled.startswith("No sampling run yet")


def test_a_report_finds_the_session_below_another_nodes_override(tiny_model):
    model = patched(tiny_model("flux")).clone()
    model.model_options["transformer_options"][OPTION] = lambda func, *a, **kw: func(*a, **kw)
    sampling.sample(model, "flux", steps=1)
    text, _ = report(model)
    assert text.startswith("0 attention calls seen: another node replaced")


def test_optional_layers_that_had_nothing_to_do_are_not_missed(tiny_model):
    model = patched(tiny_model("omnigen2"), precision="fp16")
    sampling.forward(model, "omnigen2")
    text, _ = report(model)
    assert "never called" not in text
