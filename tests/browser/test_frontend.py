"""ComfyUI's real frontend, in headless Chromium, with the shipped workflows."""

import json

import pytest
from sageattention3.demo import host, tiny
from sageattention3.demo.families import FAMILIES
from sageattention3.demo.frontend import Visit, tour
from sageattention3.demo.graph import (
    PATCH_NODE,
    REPORT_NODE,
    SMALL,
    inputs_of,
    is_widget,
    shrink,
    to_prompt,
)
from sageattention3.demo.pack import ROOT
from sageattention3.workflows.build.sheet import TITLE

WORKFLOWS = {path.stem: path for path in sorted((ROOT / "workflows").glob("*.json"))}
PICTURES = ROOT / "output" / "browser"  # kept, to look at

pytestmark = [pytest.mark.browser, pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def workflows():
    return {name: json.loads(path.read_text("utf-8")) for name, path in WORKFLOWS.items()}


@pytest.fixture(scope="module")
def sights(server, workflows):
    """Every shipped workflow as the frontend shows it."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    visits = [
        Visit(workflow, loaded_png=PICTURES / f"{name}.png") for name, workflow in workflows.items()
    ]
    return dict(zip(workflows, tour(server.url, visits, crop=True), strict=True))


@pytest.fixture(scope="module")
def run(server, object_info, workflows):
    """A shipped workflow with a tiny model, run by pressing the frontend's Run button."""
    family = FAMILIES["wan_t2v"]
    host.import_comfy()
    tiny.checkpoint(family.name)
    PICTURES.mkdir(parents=True, exist_ok=True)
    workflow = workflows[family.workflow]
    prompt = shrink(to_prompt(workflow, object_info), family, object_info)
    [sight] = tour(server.url, [Visit(workflow, prompt, done_png=PICTURES / "run.png")])
    return sight


@pytest.fixture(scope="module")
def calibrated(server, object_info, workflows):
    """The graph that calibrates, patches, samples, reports and compares, run the same way."""
    family = FAMILIES["flux"]
    PICTURES.mkdir(parents=True, exist_ok=True)
    workflow = workflows["calibrate_and_compare"]
    sizes = {**SMALL, "steps": 16}
    prompt = shrink(to_prompt(workflow, object_info), family, object_info, sizes)
    [sight] = tour(server.url, [Visit(workflow, prompt, done_png=PICTURES / "calibrated.png")])
    return sight


def only(sight, type_):
    [node] = [node for node in sight.nodes if node["type"] == type_]
    return node


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_frontend_and_the_converter_make_the_same_prompt(name, sights, workflows, object_info):
    """Two independent readings of one file."""
    shown = {i: (node["class_type"], node["inputs"]) for i, node in sights[name].prompt.items()}
    ours = to_prompt(workflows[name], object_info)
    assert shown == {i: (node["class_type"], node["inputs"]) for i, node in ours.items()}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_nodes_are_drawn_where_and_as_large_as_the_file_says(name, sights, workflows):
    """So that nodes which don't overlap in the file don't on the screen either."""
    for node, drawn in zip(workflows[name]["nodes"], sights[name].nodes, strict=True):
        (x, y), (width, height) = node["pos"], node["size"]
        assert drawn["bounds"] == [x, y - TITLE, width, height + TITLE], node["type"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_opens_without_an_error_on_the_page(name, sights):
    assert sights[name].errors == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_our_nodes_show_their_widgets(name, sights, object_info):
    declared = inputs_of(object_info[PATCH_NODE])
    patch = only(sights[name], PATCH_NODE)
    assert patch["title"] == "SageAttention3 Patch"
    assert list(patch["widgets"]) == [
        w for w, (kind, opts) in declared.items() if is_widget(kind, opts)
    ]
    report = only(sights[name], REPORT_NODE)
    assert report["title"] == "SageAttention3 Report"
    assert report["widgets"] == {"report_text": ""}


def test_the_run_button_runs_the_graph(run):
    assert run.status["status_str"] == "success"
    assert run.errors == []


def test_the_report_node_shows_its_text_and_its_picture(run):
    report = only(run, REPORT_NODE)
    text = report["widgets"]["report_text"]
    assert text.startswith("4 of 8 attention calls ran in int8 (reference emulation)")
    assert "block.0-1.self" in text
    [(width, height)] = report["images"]
    assert width >= 300
    assert height >= 100


def test_the_calibrating_graph_runs_and_its_nodes_show_what_they_found(calibrated):
    assert calibrated.status["status_str"] == "success"
    assert calibrated.errors == []
    shown = {
        kind: only(calibrated, f"SageAttention3{kind}")
        for kind in ("Calibrate", "Report", "Compare")
    }
    texts = {kind: node["widgets"]["report_text"] for kind, node in shown.items()}
    assert texts["Calibrate"].startswith("Fastest within max_error 0.05: ")
    assert "Note: Fastest within max_error 0.05: " in texts["Report"]
    assert "latent" in texts["Compare"]
    for node in shown.values():
        [(width, height)] = node["images"]
        assert width >= 300
        assert height >= 100
