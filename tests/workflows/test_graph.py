"""The converter and the shrinker on small graphs made by hand; no server needed."""

import pytest
from sageattention3.demo.graph import GraphError, shrink, to_prompt

MODEL, CONDITIONING, LATENT = ["MODEL", {}], ["CONDITIONING", {}], ["LATENT", {}]


def node_info(inputs, outputs, **optional):
    return {
        "input": {"required": inputs, "optional": optional},
        "output": list(outputs.values()),
        "output_name": list(outputs),
    }


OBJECT_INFO = {
    "Loader": node_info({"file": [["a.safetensors"], {}]}, {"MODEL": "MODEL", "CLIP": "CLIP"}),
    "VAELoader": node_info({}, {"VAE": "VAE"}),
    "Encode": node_info({"text": ["STRING", {}], "clip": ["CLIP", {}]}, {"COND": "CONDITIONING"}),
    "Guidance": node_info(
        {"conditioning": CONDITIONING, "guidance": ["FLOAT", {}]}, {"COND": "CONDITIONING"}
    ),
    "Latent": node_info({"width": ["INT", {}]}, {"LATENT": "LATENT"}),
    "ImageToVideo": node_info(
        {"positive": CONDITIONING, "vae": ["VAE", {}], "width": ["INT", {}]},
        {"positive": "CONDITIONING", "latent": "LATENT"},
    ),
    "SageAttention3Patch": node_info(
        {
            "model": MODEL,
            "preset": ["COMBO", {"options": ["balanced", "speed"]}],
            "min_tokens": ["INT", {}],
            "emulation": ["BOOLEAN", {}],
        },
        {"MODEL": "MODEL"},
    ),
    "Sampler": node_info(
        {
            "model": MODEL,
            "seed": ["INT", {"control_after_generate": True}],
            "steps": ["INT", {}],
            "positive": CONDITIONING,
            "latent": LATENT,
        },
        {"LATENT": "LATENT"},
    ),
    "SageAttention3Report": node_info({"samples": LATENT, "model": MODEL}, {"samples": "LATENT"}),
    "Decode": node_info({"samples": LATENT, "vae": ["VAE", {}]}, {"IMAGE": "IMAGE"}),
}


def ui_node(node_id, type_, widgets=(), mode=0, **links):
    return {
        "id": node_id,
        "type": type_,
        "order": node_id,
        "mode": mode,
        "inputs": [{"name": name, "link": link} for name, link in links.items()],
        "widgets_values": list(widgets),
    }


@pytest.fixture
def workflow():
    return {
        "nodes": [
            ui_node(1, "Loader", ["a.safetensors"]),
            ui_node(2, "Encode", ["a cat"], clip=1),
            ui_node(3, "MarkdownNote", ["read me"]),
            ui_node(4, "Sampler", [7, "fixed", 20], model=2, positive=3, latent=None),
        ],
        "links": [
            [1, 1, 1, 2, 1, "CLIP"],
            [2, 1, 0, 4, 0, "MODEL"],
            [3, 2, 0, 4, 1, "CONDITIONING"],
        ],
    }


def test_a_workflow_becomes_the_prompt_that_its_links_and_widgets_say(workflow):
    assert to_prompt(workflow, OBJECT_INFO) == {
        "1": {"class_type": "Loader", "inputs": {"file": "a.safetensors"}},
        "2": {"class_type": "Encode", "inputs": {"text": "a cat", "clip": ["1", 1]}},
        "4": {
            "class_type": "Sampler",
            "inputs": {"seed": 7, "steps": 20, "model": ["1", 0], "positive": ["2", 0]},
        },
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "Nowhere"}, r"node 2 \(Nowhere\) is unknown to this host"),
        ({"mode": 4}, r"node 2 \(Encode\) is muted or bypassed"),
        ({"widgets_values": []}, r"node 2 \(Encode\) has 0 widget values, .*\b1\b"),
    ],
)
def test_what_the_converter_cannot_do_is_an_error_that_names_the_node(workflow, change, message):
    workflow["nodes"][1] |= change
    with pytest.raises(GraphError, match=message):
        to_prompt(workflow, OBJECT_INFO)


class TinyFamily:
    def model_node(self):
        return {"class_type": "Tiny", "inputs": {}}

    def conditioning_node(self, seed):
        return {"class_type": "TinyText", "inputs": {"seed": seed}}

    def empty_latent_node(self, width, height, length):
        return {"class_type": "Latent", "inputs": {"width": width}}


def shipped_prompt():
    return {
        "1": {"class_type": "Loader", "inputs": {"file": "a.safetensors"}},
        "2": {"class_type": "VAELoader", "inputs": {}},
        "3": {"class_type": "Encode", "inputs": {"text": "a cat", "clip": ["1", 1]}},
        "4": {"class_type": "Guidance", "inputs": {"conditioning": ["3", 0], "guidance": 3.5}},
        "5": {
            "class_type": "ImageToVideo",
            "inputs": {"positive": ["4", 0], "vae": ["2", 0], "width": 832},
        },
        "6": {
            "class_type": "SageAttention3Patch",
            "inputs": {
                "model": ["1", 0],
                "preset": "balanced",
                "min_tokens": 1024,
                "emulation": False,
            },
        },
        "7": {
            "class_type": "Sampler",
            "inputs": {
                "model": ["6", 0],
                "seed": 7,
                "steps": 20,
                "positive": ["5", 0],
                "latent": ["5", 1],
            },
        },
        "8": {
            "class_type": "SageAttention3Report",
            "inputs": {"samples": ["7", 0], "model": ["6", 0]},
        },
        "9": {"class_type": "Decode", "inputs": {"samples": ["8", 0], "vae": ["2", 0]}},
    }


def shrunk(prompt, **options):
    return shrink(prompt, TinyFamily(), OBJECT_INFO, **options)


def test_shrinking_keeps_the_path_from_patch_to_report_and_replaces_the_rest():
    small = shrunk(shipped_prompt())
    assert small["1"] == {"class_type": "Tiny", "inputs": {}}
    assert small["3"] == {"class_type": "TinyText", "inputs": {"seed": 3}}
    assert small["4"]["inputs"] == {"conditioning": ["3", 0], "guidance": 3.5}
    assert small["5"] == {"class_type": "Latent", "inputs": {"width": 64}}
    assert small["7"]["inputs"] == {
        "model": ["6", 0],
        "seed": 7,
        "steps": 2,
        "positive": ["4", 0],
        "latent": ["5", 0],
    }
    assert small["8"]["inputs"] == {"samples": ["7", 0], "model": ["6", 0]}
    assert small["9"]["class_type"] == "SaveLatent"
    assert small["9"]["inputs"]["samples"] == ["8", 0]
    assert "2" not in small


def test_shrinking_lets_the_patch_see_short_sequences_and_takes_further_widgets():
    small = shrunk(shipped_prompt(), preset="speed")
    assert small["6"]["inputs"] == {
        "model": ["1", 0],
        "preset": "speed",
        "min_tokens": 0,
        "emulation": True,
    }


def test_sizes_reach_kept_nodes_and_stand_ins_alike():
    small = shrunk(shipped_prompt(), sizes={"width": 256, "height": 256, "length": 5, "steps": 4})
    assert small["5"]["inputs"] == {"width": 256}
    assert small["7"]["inputs"]["steps"] == 4


def test_shrinking_leaves_the_prompt_as_it_was():
    prompt = shipped_prompt()
    shrunk(prompt)
    assert prompt == shipped_prompt()
