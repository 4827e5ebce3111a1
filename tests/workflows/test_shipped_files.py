"""Each file in workflows/: true to the host, complete for a creator, in order for the eye."""

import itertools
import json
import urllib.error
import urllib.request

import pytest
from PIL import Image
from sageattention3.demo.graph import inputs_of, is_widget, to_prompt
from sageattention3.demo.pack import ROOT
from sageattention3.workflows.build.catalogue import RECIPES, build, build_prompt
from sageattention3.workflows.build.sheet import TITLE

FOLDER = ROOT / "workflows"
FILES = sorted(FOLDER.glob("*.json"))
OUR_NODES = {"SageAttention3Patch", "SageAttention3Report"}
NOTES = {"MarkdownNote"}

pytestmark = pytest.mark.server


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def file(request):
    return request.param


@pytest.fixture
def workflow(file):
    return json.loads(file.read_text("utf-8"))


def nodes_of(workflow):
    return [node for node in workflow["nodes"] if node["type"] not in NOTES]


def test_every_recipe_has_its_file_and_every_file_its_recipe():
    assert {path.stem for path in FILES} == set(RECIPES)


def test_the_file_is_what_its_recipe_writes_on_this_host(file, object_info):
    assert file.read_text("utf-8") == build(file.stem, object_info), (
        "run `.venv/bin/python workflows/build`"
    )


def test_the_prompt_for_users_without_a_frontend_is_that_of_the_workflow(file, object_info):
    prompt = (FOLDER / "api" / file.name).read_text("utf-8")
    assert prompt == build_prompt(file.read_text("utf-8"), object_info), (
        "run `.venv/bin/python workflows/build`"
    )


def test_every_prompt_has_its_workflow():
    assert {path.name for path in (FOLDER / "api").iterdir()} == {path.name for path in FILES}


def test_every_node_and_its_slots_are_those_of_the_host(workflow, object_info):
    for node in nodes_of(workflow):
        info = object_info[node["type"]]
        declared = inputs_of(info)
        sockets = {
            name: kind for name, (kind, opts) in declared.items() if not is_widget(kind, opts)
        }
        assert {socket["name"]: socket["type"] for socket in node["inputs"]} == sockets
        assert [output["type"] for output in node["outputs"]] == info["output"]


def test_every_link_joins_two_slots_of_one_type_and_both_know_it(workflow):
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for link, source, source_slot, target, target_slot, kind in workflow["links"]:
        output = nodes[source]["outputs"][source_slot]
        socket = nodes[target]["inputs"][target_slot]
        assert output["type"] == kind
        assert kind in socket["type"].split(",")  # some take several types
        assert link in output["links"]
        assert socket["link"] == link
    linked = [s["link"] for n in nodes.values() for s in n["inputs"] if s["link"] is not None]
    assert sorted(linked) == [link[0] for link in workflow["links"]]


def test_the_server_misses_nothing_but_files(workflow, object_info, server):
    """The server validates the whole prompt; its only complaints must be files not on its disk."""
    prompt = to_prompt(workflow, object_info)
    files = {model["name"] for node in nodes_of(workflow) for model in models_of(node)}
    files |= {n["inputs"]["image"] for n in prompt.values() if n["class_type"] == "LoadImage"}
    missed = set()
    for node_id, node in refusal(server, prompt)["node_errors"].items():
        for error in node["errors"]:
            named = [file for file in files if file in error["details"]]
            assert named, f"node {node_id}: {error['message']}, {error['details']}"
            missed |= set(named)
    assert missed == files


def refusal(server, prompt):
    request = urllib.request.Request(
        f"{server.url}/prompt", json.dumps({"prompt": prompt}).encode(), method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    return json.load(caught.value)


def models_of(node):
    return node["properties"].get("models", [])


def test_each_model_file_comes_with_its_download(workflow):
    for node in nodes_of(workflow):
        files = [v for v in node["widgets_values"] if str(v).endswith(".safetensors")]
        assert [model["name"] for model in models_of(node)] == files
        for model in models_of(node):
            assert model["url"].startswith("https://")
            assert model["url"].endswith(f"/{model['name']}")
            assert model["directory"] in LOADED_FROM[node["type"]]


LOADED_FROM = {
    "UNETLoader": {"diffusion_models"},
    "CheckpointLoaderSimple": {"checkpoints"},
    "CLIPLoader": {"text_encoders"},
    "DualCLIPLoader": {"text_encoders"},
    "VAELoader": {"vae"},
    "CLIPVisionLoader": {"clip_vision"},
}


def test_no_model_reaches_a_sampler_past_the_patch(workflow, object_info):
    prompt = to_prompt(workflow, object_info)
    [patch] = [i for i, node in prompt.items() if node["class_type"] == "SageAttention3Patch"]
    for node_id, node in prompt.items():
        if node_id == patch or "model" not in node["inputs"]:
            continue
        if node["class_type"] == "SageAttention3Calibrate":
            continue  # measures the model as it is
        source = node["inputs"]["model"][0]
        while source != patch:
            assert "model" in prompt[source]["inputs"], f"node {node_id} gets an unpatched model"
            source = prompt[source]["inputs"]["model"][0]


def test_the_report_stands_between_the_sampler_and_the_decoder(workflow, object_info):
    prompt = to_prompt(workflow, object_info)
    [report] = [i for i, node in prompt.items() if node["class_type"] == "SageAttention3Report"]
    source, slot = prompt[report]["inputs"]["samples"]
    assert prompt[source]["class_type"] in {"KSampler", "SamplerCustom", "SamplerCustomAdvanced"}
    assert slot == 0
    [decoder] = [node for node in prompt.values() if node["class_type"].startswith("VAEDecode")]
    assert decoder["inputs"]["samples"] == [report, 0]
    assert prompt[prompt[report]["inputs"]["model"][0]]["class_type"] == "SageAttention3Patch"


def test_nodes_do_not_overlap_and_stand_within_their_frame_or_outside_of_all(workflow):
    boxes = [box_of(node) for node in workflow["nodes"]]
    for one, other in itertools.combinations(boxes, 2):
        assert not overlap(one, other)
    frames = [group["bounding"] for group in workflow["groups"]]
    frames = [(x, y, x + w, y + h) for x, y, w, h in frames]
    for one, other in itertools.combinations(frames, 2):
        assert not overlap(one, other)
    for box in boxes:
        assert all(contains(frame, box) or not overlap(frame, box) for frame in frames)


def box_of(node):
    (x, y), (w, h) = node["pos"], node["size"]
    return x, y - TITLE, x + w, y + h


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def contains(frame, box):
    return frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]


def test_links_run_from_left_to_right_or_down_a_column(workflow):
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for _, source, _, target, *_ in workflow["links"]:
        (x, y), (x2, y2) = nodes[source]["pos"], nodes[target]["pos"]
        assert x < x2 or (x == x2 and y < y2)


def test_a_note_gives_advice(workflow):
    [note] = [node for node in workflow["nodes"] if node["type"] in NOTES]
    assert len(note["widgets_values"][0]) > 100


def test_the_picture_is_small_and_square(file):
    path = file.with_suffix(".jpg")
    assert path.stat().st_size <= 60_000
    with Image.open(path) as picture:
        assert picture.format == "JPEG"
        assert picture.size == (480, 480)


def test_the_template_browser_is_offered_the_file_and_its_picture(file, workflow, server):
    with urllib.request.urlopen(f"{server.url}/api/workflow_templates") as answer:
        offered = json.load(answer)
    [pack] = [name for name, stems in offered.items() if file.stem in stems]
    base = f"{server.url}/api/workflow_templates/{pack}/{file.stem}"
    with urllib.request.urlopen(f"{base}.json") as answer:
        assert json.load(answer) == workflow
    with urllib.request.urlopen(f"{base}.jpg") as answer:
        assert answer.headers["Content-Type"] == "image/jpeg"
