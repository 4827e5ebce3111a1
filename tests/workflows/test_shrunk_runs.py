"""Every shipped graph runs on a real server, with a tiny model in the place of the big one."""

import itertools
import json
import re

import pytest
from sageattention3.demo import host, tiny
from sageattention3.demo.families import FAMILIES
from sageattention3.demo.graph import COMPARE_NODE, REPORT_NODE, SMALL, shrink, to_prompt
from sageattention3.demo.pack import ROOT

# family -> layers -> precision and calls that the report must show: the calls that the tiny model
# makes in one forward pass, times two steps, under the preset that the graph ships with.
EXPECTED = {
    "flux": {
        "double.0": ("fp16", 2),
        "double.1": ("int8", 2),
        "single.0-1": ("int8", 4),
        "single.2": ("fp16", 2),
    },
    "sd3": {
        "block.0.joint, block.2.joint": ("fp16", 4),
        "block.0.self": ("fp16", 2),
        "block.1.joint": ("int8", 2),
        "block.1.self": ("int8", 2),
    },
    "qwen_image": {"double.0-1": ("fp16", 4)},
    "hunyuan_video": {
        "refiner.0-1": ("int8", 4),
        "double.0-1": ("int8", 4),
        "single.0-1": ("int8", 4),
    },
    "wan_t2v": {"block.0-1.self": ("int8", 4), "block.0-1.cross": ("fp16", 4)},
    "wan_i2v": {
        "block.0-1.self": ("int8", 4),
        "block.0-1.image": ("fp16", 4),
        "block.0-1.text": ("fp16", 4),
    },
    "ltxv": {"block.0-1.self": ("int8", 4), "block.0-1.cross": ("fp16", 4)},
}

CALIBRATED = "calibrate_and_compare"

pytestmark = [pytest.mark.server, pytest.mark.host]


@pytest.fixture(params=EXPECTED)
def family(request):
    family = FAMILIES[request.param]
    if family.from_file:
        host.import_comfy()
        tiny.checkpoint(family.name)
    return family


@pytest.fixture
def prompt(family, object_info):
    path = ROOT / "workflows" / f"{family.workflow}.json"
    return shrink(to_prompt(json.loads(path.read_text("utf-8")), object_info), family, object_info)


def run(server, prompt):
    """The report's text and its pictures, and the saved latents."""
    outputs = server.run(prompt)["outputs"].values()
    [report] = [output for output in outputs if "text" in output]
    [saved] = [output for output in outputs if "latents" in output]
    return report["text"][0], report["images"], saved["latents"]


def rows_of(text):
    """layers -> (precision, backend, calls, reason) of the report's table."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if set(line) == {"-"}) + 1
    rows = {}
    for line in itertools.takewhile(str.strip, lines[start:]):
        layers, precision, backend, calls, _steps, *reason = re.split(r"\s{2,}", line)
        rows[layers] = (precision, backend, int(calls.replace(",", "")), *reason)
    return rows


def test_every_shipped_workflow_has_a_tiny_family():
    shipped = {path.stem for path in (ROOT / "workflows").glob("*.json")}
    assert {FAMILIES[name].workflow for name in EXPECTED} | {CALIBRATED} == shipped


def test_the_report_accounts_for_every_attention_call(family, prompt, server):
    text, images, latents = run(server, prompt)
    rows = rows_of(text)
    assert {k: (precision, calls) for k, (precision, _, calls, *_) in rows.items()} == EXPECTED[
        family.name
    ]
    total = sum(calls for _, calls in EXPECTED[family.name].values())
    assert re.search(rf"\b{total} attention calls\b", text.splitlines()[0])
    for precision, backend, _, *reason in rows.values():
        assert backend == ("host" if precision == "fp16" else "reference emulation")
        assert reason or precision != "fp16", "who stays with the host has a reason"
    assert len(images) == len(latents) == 1


def test_a_calibration_patches_samples_reports_and_compares_in_one_graph(server, object_info):
    workflow = json.loads((ROOT / "workflows" / f"{CALIBRATED}.json").read_text("utf-8"))
    # Enough steps for a calibration, which may take 1.5 times as long as they do.
    sizes = {**SMALL, "steps": 16}
    prompt = shrink(to_prompt(workflow, object_info), FAMILIES["flux"], object_info, sizes)
    outputs = server.run(prompt)["outputs"]

    def text_of(kind):
        [node] = [i for i, node in prompt.items() if node["class_type"] == kind]
        assert len(outputs[node]["images"]) == 1
        return outputs[node]["text"][0]

    sentence, *_ = text_of("SageAttention3Calibrate").partition("\n\n")
    assert sentence.startswith("Fastest within max_error 0.05: ")
    rows = rows_of(text_of(REPORT_NODE))
    assert any(precision != "fp16" for precision, *_ in rows.values())
    assert "flux, max_error 0.05" in text_of(REPORT_NODE)
    # The Patch leaves the calibration's own choice as it is.
    note = " ".join(f"Note: {sentence}".split())
    assert note in " ".join(text_of(REPORT_NODE).split())
    assert "latent" in text_of(COMPARE_NODE)
