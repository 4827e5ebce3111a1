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


# Two texts for the same layers: the host would take the second run's Patch from its cache, of which
# a page that was opened later hears nothing.
@pytest.fixture(scope="module", params=["first 1", "block.0"], ids=["old", "nodes2"])
def strips(request, server, object_info, workflows):
    """The same run with two cells of the layer strip clicked, in both ways of drawing nodes."""
    vue_nodes = request.param == "block.0"
    family = FAMILIES["wan_t2v"]
    host.import_comfy()
    tiny.checkpoint(family.name)
    PICTURES.mkdir(parents=True, exist_ok=True)
    workflow = workflows[family.workflow]
    prompt = shrink(
        to_prompt(workflow, object_info), family, object_info, fp16_layers=request.param
    )
    visit = Visit(
        workflow,
        run=prompt,
        clicks=['[data-layer="block.1.self"]', '[data-layer="block.0.self"]'],
        look_at="[data-layer]",
        vue_nodes=vue_nodes,
        done_png=PICTURES / f"strip_{'nodes2' if vue_nodes else 'old'}.png",
    )
    [sight] = tour(server.url, [visit])
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
    *shown, strip = patch["widgets"]
    assert shown == [w for w, (kind, opts) in declared.items() if is_widget(kind, opts)]
    assert strip.startswith("layers ")
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


def test_clicks_on_the_layer_strip_edit_the_text_and_nothing_else(strips):
    """`first 1` becomes what is left of it, and the layer that was clicked first."""
    [(before, after)] = [
        (strips.prompt[i]["inputs"], node["inputs"])
        for i, node in strips.clicked_prompt.items()
        if node["class_type"] == PATCH_NODE
    ]
    assert strips.status["status_str"] == "success"
    assert after["fp16_layers"] == "block.0.cross, block.1.self"
    assert set(after) == set(before), "the strip itself is not part of the graph"
    assert strips.errors == []


def test_the_layer_strip_shows_every_layer_and_what_stays_in_fp16(strips):
    shown = {cell["layer"]: cell["fp16"] for cell in strips.seen}
    assert shown == {
        "block.0.self": "no",
        "block.0.cross": "yes",
        "block.1.self": "yes",
        "block.1.cross": "yes",  # as cross_attention says
    }


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
