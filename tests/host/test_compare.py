"""SageAttention3 Compare as the host calls it: checked before a run, shown after it."""

import asyncio

import execution
import folder_paths
import pytest
import torch
from sageattention3.nodes.compare import SageAttention3Compare
from sageattention3.nodes.engine.comparison import ComparisonError

import nodes

pytestmark = pytest.mark.host

IMAGE = {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 1}}
IMAGE["inputs"]["color"] = 0
LATENT = {
    "class_type": "EmptyLatentImage",
    "inputs": {"width": 64, "height": 64, "batch_size": 1},
}


@pytest.fixture(autouse=True)
def _registered(monkeypatch, tmp_path):
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "SageAttention3Compare", SageAttention3Compare)
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))


def validated(**inputs):
    """(valid, text of the errors), by the host's own check of a queued prompt."""
    graph = {"1": {"class_type": "SageAttention3Compare", "inputs": inputs}, "2": IMAGE}
    graph |= {"3": LATENT, "4": {"class_type": "PrimitiveInt", "inputs": {"value": 1}}}
    valid, errors, _ = asyncio.run(execution.validate_inputs("prompt", graph, "1", {}))
    return valid, " ".join(f"{error['message']}: {error['details']}" for error in errors)


@pytest.fixture(autouse=True, scope="module")
def _primitive_nodes():
    from comfy_extras import nodes_primitive

    for node in (nodes_primitive.Int,):
        nodes.NODE_CLASS_MAPPINGS.setdefault("PrimitiveInt", node)


@pytest.mark.parametrize("source", ["2", "3"])
def test_two_images_or_two_latents_pass_the_hosts_check(source):
    assert validated(reference=[source, 0], result=[source, 0]) == (True, "")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"reference": ["2", 0]}, "Required input is missing: result"),
        ({"result": ["3", 0]}, "Required input is missing: reference"),
        ({"reference": ["2", 0], "result": ["3", 0]}, "reference is IMAGE and result is LATENT"),
        ({"reference": ["4", 0], "result": ["3", 0]}, "reference is INT: connect an IMAGE or a"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_the_run(inputs, words):
    valid, text = validated(**inputs)
    assert not valid
    assert words in text.replace("result is LATENT and reference is IMAGE", words)


def test_a_value_that_comes_without_a_link_is_refused_at_the_node():
    with pytest.raises(ComparisonError, match="neither an IMAGE nor a LATENT"):
        SageAttention3Compare().compare(5, 5)


def test_the_node_shows_its_text_and_picture_and_hands_both_on():
    image = torch.rand(2, 32, 32, 3)
    answer = SageAttention3Compare().compare(image, image * 0.9)
    picture, text = answer["result"]
    assert answer["ui"]["text"] == (text,)
    assert "PSNR" in text
    assert len(answer["ui"]["images"]) == 1
    assert picture.ndim == 4
