"""Builds the tiny models of ``families``: as files that the host loads, or in process.

Both are the same model: seeded random weights at the scale of a freshly initialised network, so
that attention is neither uniform nor one-hot. Imports ComfyUI; call ``host.import_comfy`` first.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .families import FAMILIES, FRAMES_AS_BATCH, Family, Text
from .host import MODELS

SEED = 0
# Of the weights of a seed, kept in each file: a file of another recipe is made anew.
RECIPE = {"recipe": "2"}


def model(name: str, seed: int = SEED, **widths: Any) -> Any:
    """A ModelPatcher of the family's real host model class, on the CPU, FP32.

    widths: over the family's own, such as more blocks.
    """
    import comfy.model_management
    import comfy.model_patcher

    family = replace(FAMILIES[name], config={**FAMILIES[name].config, **widths})
    return comfy.model_patcher.ModelPatcher(
        build(family, seed),
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )


def checkpoint(name: str) -> Path:
    """The family's file among the demo host's diffusion models; made on first use."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    family = FAMILIES[name]
    path = MODELS / family.file_name
    metadata = {**family.metadata, **RECIPE}
    if path.exists():
        with safe_open(path, framework="pt") as file:
            if file.metadata() == metadata:
                return path
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {
        key: value.contiguous()
        for key, value in build(family, SEED).diffusion_model.state_dict().items()
        if value.numel()
    }
    partial = path.with_suffix(f".{os.getpid()}.partial")
    save_file(weights, partial, metadata=metadata)
    os.replace(partial, path)
    return path


def inputs(name: str, seed: int = SEED) -> tuple[torch.Tensor, dict[str, Any]]:
    """A random latent x and the keyword arguments of ``model(name).model.apply_model(x, t)``."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    batch = FRAMES_AS_BATCH if "num_video_frames" in family.conditions else 1

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator)

    x = random(*family.latent)
    kwargs: dict[str, Any] = {"c_crossattn": random(family.text.tokens, family.text.channels)}
    if family.text.pooled:
        kwargs["y"] = random(family.text.pooled)
    if family.text.masked:
        kwargs["attention_mask"] = text_mask(family.text.tokens)
    for key, value in family.conditions.items():
        if isinstance(value, tuple):
            value = random(*value)
        elif isinstance(value, list) and key != "vace_strength":
            value = torch.tensor(value)
        kwargs[key] = value
    return x, kwargs


def conditioning(name: str, seed: int = 1) -> list:
    """CONDITIONING as the family's text encoder would give it, of seeded random numbers."""
    return random_conditioning(FAMILIES[name].text, seed)


def random_conditioning(text: Text, seed: int) -> list:
    """CONDITIONING as a text encoder that delivers ``text`` would give it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(1, text.tokens, text.channels, generator=generator)
    extra: dict[str, Any] = {"pooled_output": None}  # the host's text encoders always say
    if text.pooled:
        extra["pooled_output"] = torch.randn(1, text.pooled, generator=generator)
    if text.masked:
        extra["attention_mask"] = text_mask(text.tokens)
    return [[tokens, extra]]


def text_mask(tokens: int) -> torch.Tensor:
    """[1, tokens], int64: 1 for text, 0 for the padding in the last third."""
    mask = torch.ones(1, tokens, dtype=torch.int64)
    mask[:, tokens - tokens // 3 :] = 0
    return mask


def build(
    family: Family, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """The host's own model of ``family`` with random weights, which are drawn on ``device``."""
    # Nodes run under inference mode; weights made there could never be trained.
    with torch.inference_mode(False):
        built = build_empty(family, device, dtype)
        generator = torch.Generator(device).manual_seed(seed)
        for key, parameter in built.diffusion_model.named_parameters():
            parameter.data = _weight(key, parameter, generator)
            parameter.requires_grad_(False)
        # Buffers that checkpoints hold are weights too (SD 3 keeps its positions in one), and the
        # host leaves them as the memory happens to be. Those that no file holds, it computes.
        parameters = dict(built.diffusion_model.named_parameters())
        for key, value in built.diffusion_model.state_dict().items():
            if key not in parameters and value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator, device=device))
    return built


def build_empty(family: Family, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """The host's own model of ``family``, its weights as the memory happens to be."""
    import comfy.supported_models

    model_class = getattr(comfy.supported_models, family.model)
    config = model_class({**model_class.unet_config, **family.config})
    config.set_inference_dtype(dtype, None)
    return config.get_model({}, "", device=device)


def _weight(key: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(like.shape, generator=generator, device=generator.device, dtype=like.dtype)
    if like.ndim >= 2:
        fan_in = like[0].numel()
        return noise.mul_(fan_in**-0.5)
    return noise * 0.02 + (0.0 if key.endswith("bias") else 1.0)
