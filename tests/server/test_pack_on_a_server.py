"""The pack as a real ComfyUI server knows it: nodes, errors before sampling, interrupts."""

import json
import re
import threading

import pytest
import torch
from safetensors.torch import load
from sageattention3.demo import host, tiny
from sageattention3.demo.families import FAMILIES
from sageattention3.demo.graph import PATCH_NODE, SMALL, shrink, to_prompt
from sageattention3.demo.server import PromptError

pytestmark = [pytest.mark.server, pytest.mark.host]

FLUX = FAMILIES["flux"]
NODES = {
    "SageAttention3Patch": ["MODEL"],
    "SageAttention3LoadDiffusionModel": ["MODEL"],
    "SageAttention3Report": ["LATENT", "STRING", "IMAGE"],
    "SageAttention3Calibrate": ["SAGE3_PROFILE", "IMAGE", "STRING", "LATENT"],
    "SageAttention3CalibrateGuider": ["SAGE3_PROFILE", "IMAGE", "STRING", "LATENT"],
    "SageAttention3LoadProfile": ["SAGE3_PROFILE", "IMAGE", "STRING"],
    "SageAttention3SaveProfile": ["SAGE3_PROFILE"],
    "SageAttention3Compare": ["IMAGE", "STRING"],
    "SageAttention3Benchmark": ["IMAGE", "STRING"],
}


@pytest.fixture
def flux(object_info):
    """Makes the shipped Flux graph on the tiny model, with further widgets of the Patch."""
    path = host.ROOT / "workflows" / f"{FLUX.workflow}.json"
    whole = to_prompt(json.loads(path.read_text("utf-8")), object_info)
    return lambda sizes=SMALL, **patch: shrink(whole, FLUX, object_info, sizes, **patch)


def test_the_server_offers_the_nodes_and_their_outputs(object_info):
    ours = {name: object_info[name]["output"] for name in object_info if name in NODES}
    assert ours == NODES


def test_the_pack_loads_in_under_a_second(server):
    log = server.log.read_text("utf-8", errors="replace")
    [seconds] = re.findall(r"([\d.]+) seconds[^\n]*custom_nodes/sageattention3$", log, re.M)
    # ComfyUI has imported torch by then; the bound is the promise to the creator.
    assert float(seconds) < 1.0


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ({"fp16_layers": "double.7"}, "out of range"),
        ({"fp16_layers": "blok.0"}, "double"),
        ({"fp16_layers": "double.x"}, "double.x"),
        ({"preset": "fastest"}, "balanced, quality, speed, custom"),
        ({"precision": "fp2"}, "int8, fp4, int8_fp4, fp16"),
        ({"preset": "custom", "start_percent": 0.9, "end_percent": 0.1}, "start_percent"),
    ],
)
def test_a_setting_that_cannot_work_is_an_error_at_the_patch_before_sampling(
    patch, words, flux, server
):
    sampled = []
    with pytest.raises(PromptError, match=re.escape(words)) as caught:
        server.run(flux(**patch), lambda *progress: sampled.append(progress))
    assert caught.value.node == PATCH_NODE
    assert not sampled


def test_the_loader_node_loads_patches_and_reports(object_info, server):
    host.import_comfy()
    family = FAMILIES["wan_t2v"]
    tiny.checkpoint(family.name)
    path = host.ROOT / "workflows" / f"{family.workflow}.json"
    whole = to_prompt(json.loads(path.read_text("utf-8")), object_info)
    prompt = shrink(whole, family, object_info)
    [patch] = [i for i, node in prompt.items() if node["class_type"] == PATCH_NODE]
    widgets = {k: v for k, v in prompt[patch]["inputs"].items() if k != "model"}
    prompt[patch] = {
        "class_type": "SageAttention3LoadDiffusionModel",
        "inputs": {**family.model_node()["inputs"], **widgets},
    }
    outputs = server.run(prompt)["outputs"].values()
    [report] = [output for output in outputs if "ledger" in output]
    [rows] = report["ledger"]
    assert {row["backend"] for row in rows} == {"reference emulation", "host"}


def latent_of(server, prompt):
    outputs = server.run(prompt)["outputs"].values()
    [saved] = [output["latents"][0] for output in outputs if "latents" in output]
    return load(server.view(saved))["latent_tensor"]


def without_patch(prompt):
    """The graph with the Patch and the Report bypassed."""
    passes = {"SageAttention3Patch": "model", "SageAttention3Report": "samples"}
    targets = {
        i: node["inputs"][passes[node["class_type"]]]
        for i, node in prompt.items()
        if node["class_type"] in passes
    }

    def resolve(value):
        while isinstance(value, list) and value[0] in targets:
            value = targets[value[0]]
        return value

    return {
        i: {**node, "inputs": {k: resolve(v) for k, v in node["inputs"].items()}}
        for i, node in prompt.items()
        if i not in targets
    }


def test_an_interrupted_run_leaves_no_trace_in_the_next_unpatched_one(flux, server):
    plain = without_patch(flux())
    before = latent_of(server, plain)

    long = flux({**SMALL, "width": 256, "height": 256, "steps": 200}, precision="fp4")
    started = threading.Event()
    stopper = threading.Thread(target=lambda: started.wait(120) and server.interrupt())
    stopper.start()
    with pytest.raises(PromptError, match="interrupted"):
        server.run(long, lambda *_: started.set())
    stopper.join()

    [sampler] = [i for i, node in plain.items() if "sampler_name" in node["inputs"]]
    other_seed = {**plain[sampler]["inputs"], "seed": plain[sampler]["inputs"]["seed"] + 1}
    changed = {**plain, sampler: {**plain[sampler], "inputs": other_seed}}
    # Another seed in between, so that the last answer does not come from the server's cache.
    assert not torch.equal(latent_of(server, changed), before)
    assert torch.equal(latent_of(server, plain), before)


def report_of(server, prompt):
    outputs = server.run(prompt)["outputs"].values()
    [report] = [output for output in outputs if "ledger" in output]
    return report


def test_a_list_of_latents_is_one_report_that_passes_the_list_on(flux, server):
    prompt = flux(fp16_layers="double.0")
    [sampler] = [i for i, node in prompt.items() if "sampler_name" in node["inputs"]]
    latent = prompt[sampler]["inputs"]["latent_image"]
    prompt[latent[0]]["inputs"]["batch_size"] = 3
    prompt["list"] = {
        "class_type": "RebatchLatents",
        "inputs": {"latents": latent, "batch_size": 1},
    }
    prompt[sampler]["inputs"]["latent_image"] = ["list", 0]
    outputs = server.run(prompt)["outputs"].values()
    [report] = [output for output in outputs if "ledger" in output]
    saved = [file for output in outputs for file in output.get("latents", ())]
    assert len(saved) == len(report["ledger"]) == len(report["images"]) == 3
    [text] = report["text"]
    assert text.startswith("Run 1 of 3: ")


def test_a_report_of_an_unpatched_sampler_says_that_its_run_is_an_old_one(flux, server):
    prompt = flux(fp16_layers="double.1")
    [sampler] = [i for i, node in prompt.items() if "sampler_name" in node["inputs"]]
    assert not any(row["repeated"] for row in report_of(server, prompt)["ledger"][0])

    [patch] = [i for i, node in prompt.items() if node["class_type"] == PATCH_NODE]
    unpatched = {**prompt[sampler]["inputs"], "model": prompt[patch]["inputs"]["model"]}
    report = report_of(server, {**prompt, sampler: {**prompt[sampler], "inputs": unpatched}})
    assert report["text"][0].startswith("No sampling with this model since the last report")
    assert all(row["repeated"] for row in report["ledger"][0])


def test_the_documented_script_runs_a_prompt_and_prints_the_report(flux, server, tmp_path, capsys):
    page = (host.ROOT / "docs" / "headless.md").read_text("utf-8")
    [script] = re.findall(r"^```python\n(.+?)^```", page, re.M | re.S)
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(flux()))
    for name, value in (("url", server.url), ("file", file)):
        line = "Path({!r})" if name == "file" else "{!r}"
        script, count = re.subn(
            rf"^{name} = .+$", f"{name} = {line.format(str(value))}", script, flags=re.M
        )
        assert count == 1
    exec(script, {})
    assert "preset quality" in capsys.readouterr().out
