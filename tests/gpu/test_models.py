"""Tiny models of real families in a real ComfyUI on the GPU, their attention in native INT8."""

import pytest
import torch
from sageattention3.demo import host

try:
    host.import_comfy(cpu=False)
except host.HostError:
    pytest.skip("needs the ComfyUI host: python install.py demo", allow_module_level=True)

from sageattention3.demo import sampling, tiny
from sageattention3.demo.sampling import last_run, patched
from sageattention3.kernels.metrics import compare

pytestmark = pytest.mark.gpu

# Which of them takes a call depends on its mask and head size.
NATIVE = {"sm80_int8", "sm90_int8"}
FAMILIES = ("flux", "hunyuan_video", "wan_t2v", "sd3", "ltxv", "qwen_image", "sd15")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_samples_through_the_native_kernels(family):
    """Every call is quantised by them, and the latent stays as near as in the exact emulation."""
    model = tiny.model(family)
    plain = sampling.sample(model, family)
    assert torch.isfinite(plain).all()

    native = patched(model, emulation=False)
    out = sampling.sample(native, family)
    counts = last_run(native).counts
    assert {entry.precision for entry in counts} == {"int8"}
    assert {entry.backend for entry in counts} <= NATIVE
    errors = compare(out, plain)
    assert errors.finite
    assert 0 < errors.rel_l1 < 0.02, errors


@pytest.mark.parametrize("preset", ["balanced", "quality", "speed"])
def test_every_preset_runs_natively_where_it_wants_int8(preset):
    model = tiny.model("flux")
    native = patched(model, preset=preset, min_tokens=0, emulation=False)
    out = sampling.sample(native, "flux", steps=4)
    assert torch.isfinite(out).all()
    counts = last_run(native).counts
    assert NATIVE & {entry.backend for entry in counts}
    assert {entry.backend for entry in counts} <= {*NATIVE, "host"}


def test_a_model_whose_weights_stay_with_the_cpu_samples_the_same(monkeypatch):
    """As with --novram: the host brings each layer's weights to the GPU when it is due."""
    import comfy.model_management as management

    whole = patched(tiny.model("flux"), emulation=False)
    expected = sampling.sample(whole, "flux")

    monkeypatch.setattr(management, "vram_state", management.VRAMState.NO_VRAM)
    model = patched(tiny.model("flux"), emulation=False)
    out = sampling.sample(model, "flux")
    assert model.model.diffusion_model.double_blocks[0].img_attn.qkv.weight.device.type == "cpu"
    assert {entry.backend for entry in last_run(model).counts} <= NATIVE
    assert torch.equal(out, expected)
