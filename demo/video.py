"""Clips of the shipped model in the host's own sampler, under one plan after another.

Call ``host.import_comfy`` first.
"""

import filecmp
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..kernels.reference import SCHEMES, Scheme, reference_attention
from ..nodes.engine.attach import clone_without_ours, set_override
from ..nodes.engine.call import AttentionCall, read_call
from ..nodes.engine.forecast import contributions
from ..nodes.engine.profile import Profile
from . import codec, words
from .clips import SIZE
from .host import MODELS
from .sampling import apply, calibrated, patched, sample
from .train import CHECKPOINT
from .video_model import FRAMES

FAMILY = "hunyuan_video"
SHIFT = float(json.loads((words.MODEL / "training.json").read_text())["options"]["shift"])
LATENT = (codec.CHANNELS, FRAMES, SIZE // codec.PATCH, SIZE // codec.PATCH)
DIRECT_P = replace(SCHEMES["fp4"], p_scaling="direct")  # the failure of the paper's figure 12
WORST = 3  # layers kept in fp16 by calibration

Models = Mapping[str, Any]


def load_model() -> Any:
    """The shipped model (ModelPatcher), with the noise levels that it was trained for."""
    from comfy.sd import load_diffusion_model  # what the node UNETLoader calls
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    [model] = ModelSamplingSD3().patch(
        load_diffusion_model(str(words.MODEL / CHECKPOINT)), shift=SHIFT
    )
    return model


def checkpoint() -> Path:
    """The shipped model among the demo host's diffusion models, where ``UNETLoader`` finds it."""
    shipped, path = words.MODEL / CHECKPOINT, MODELS / CHECKPOINT
    if not path.exists() or not filecmp.cmp(shipped, path, shallow=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        shutil.copyfile(shipped, partial)
        os.replace(partial, path)
    return path


def make_latent(
    model: Any, prompt: str, seed: int, steps: int, frames: int = FRAMES
) -> torch.Tensor:
    """[1, 16, frames, height / 4, width / 4], on the host's scale."""
    return sample(
        model,
        FAMILY,
        seed=seed,
        steps=steps,
        latent=(LATENT[0], frames, *LATENT[2:]),
        positive=words.conditioning(prompt),
        negative=words.conditioning(""),
    )


def pictures(latent: torch.Tensor) -> torch.Tensor:
    """The clip of one latent as the host's IMAGE, [frames, height, width, 3] in 0..1."""
    return codec.load().decode(latent.float().cpu())[0].permute(1, 2, 3, 0)


def calibrate(model: Any, prompt: str, seed: int, steps: int) -> Profile:
    """What each layer costs in each precision, measured on one clip."""
    profile, _ = calibrated(
        model,
        FAMILY,
        seed=seed,
        steps=steps,
        latent=LATENT,
        positive=words.conditioning(prompt),
        negative=words.conditioning(""),
    )
    return profile


def block_states(model: Any, latent: torch.Tensor, prompt: str, sigma: float) -> list[torch.Tensor]:
    """What leaves each block, pictures' tokens alone, in one pass over ``latent`` noised to sigma.

    latent: as the host's sampler returns it.
    """
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
    context, pooled = words.load().embed(words.parse(prompt)[None])
    network = model.model.diffusion_model
    tokens = latent[0, 0].numel() // 4
    states: list[torch.Tensor] = []

    def keep(_block: torch.nn.Module, _given: tuple, out: Any) -> None:
        image = out[0] if isinstance(out, tuple) else out
        states.append(image[:, :tokens].clone())  # blocks change it in place later on

    hooks = [
        block.register_forward_hook(keep)
        for block in (*network.double_blocks, *network.single_blocks)
    ]
    try:
        x = torch.lerp(latent * codec.LATENT_SCALE, noise, sigma)
        apply(model, x, sigma, {"c_crossattn": context, "y": pooled})
    finally:
        for hook in hooks:
            hook.remove()
    return states


def worst_layers(profile: Profile, precision: str = "fp4") -> list[str]:
    """Layers from the one that moves the latent most to the one that moves it least."""
    added = contributions(profile, precision).sum(1)
    return [profile.layers[i] for i in (-added).argsort(kind="stable")]


def plans(model: Any, profile: Profile) -> Models:
    """The model in every precision. fp16, the host's own attention, is the yardstick."""
    kept = ", ".join(worst_layers(profile)[:WORST])
    return {
        "fp16": model,
        "int8": patched(model, precision="int8"),
        "int8_fp4": patched(model, precision="int8_fp4"),
        f"fp4, worst {WORST} layers fp16": patched(model, precision="fp4", fp16_layers=kept),
        "fp4": patched(model, precision="fp4"),
        "fp4, P direct": with_scheme(model, DIRECT_P),
    }


def with_scheme(model: Any, scheme: Scheme) -> Any:
    """A clone of ``model`` all of whose attention is the reference algorithm's by ``scheme``."""
    clone, _ = clone_without_ours(model)

    def override(_func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = read_call(*args, **kwargs)
        assert isinstance(call, AttentionCall), call  # this model makes no other
        out = reference_attention(call.q, call.k, call.v, scheme=scheme, mask=call.mask)
        return call.finish(out.to(call.q.dtype))

    set_override(clone, override)
    return clone
