"""Nodes of the demo host: tiny models and what they need in the place of text encoder and VAE."""

from typing import Any

import torch

from . import codec, words
from .families import FAMILIES
from .tiny import conditioning, model


class SageAttention3DemoModel:
    TITLE = "Tiny Model (demo)"
    CATEGORY = "SageAttention3/demo"
    DESCRIPTION = "A tiny random model of a family whose widths the host's loader hard-codes."
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "build"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {"required": {"family": (list(FAMILIES),)}}

    def build(self, family: str) -> tuple[Any]:
        return (model(family),)


class SageAttention3DemoConditioning:
    TITLE = "Random Conditioning (demo)"
    CATEGORY = "SageAttention3/demo"
    DESCRIPTION = "Seeded random conditioning in the place of a text encoder's."
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        seed = ("INT", {"default": 0, "min": 0, "max": 2**32 - 1})
        return {"required": {"family": (list(FAMILIES),), "seed": seed}}

    def make(self, family: str, seed: int) -> tuple[list]:
        return (conditioning(family, seed),)


class SageAttention3DemoPrompt:
    TITLE = "Prompt (demo)"
    CATEGORY = "SageAttention3/demo"
    DESCRIPTION = "Five words for the demo's video model; none for the negative prompt."
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "embed"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {"required": {"prompt": ("STRING", {"default": words.EXAMPLE})}}

    @classmethod
    def VALIDATE_INPUTS(cls, prompt: str) -> bool | str:  # noqa: N802
        try:
            words.parse(prompt)
        except ValueError as error:
            return str(error)
        return True

    def embed(self, prompt: str) -> tuple[list]:
        return (words.conditioning(prompt),)


class SageAttention3DemoDecode:
    TITLE = "Decode Clip (demo)"
    CATEGORY = "SageAttention3/demo"
    DESCRIPTION = "Latents of the demo's video model as pictures: four pixels a cell, both ways."
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "decode"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {"required": {"samples": ("LATENT",)}}

    def decode(self, samples: dict[str, Any]) -> tuple[torch.Tensor]:
        clips = codec.load().decode(samples["samples"].float().cpu())
        return (clips.permute(0, 2, 3, 4, 1).flatten(0, 1),)


NODE_CLASS_MAPPINGS = {
    node.__name__: node
    for node in (
        SageAttention3DemoModel,
        SageAttention3DemoConditioning,
        SageAttention3DemoPrompt,
        SageAttention3DemoDecode,
    )
}
NODE_DISPLAY_NAME_MAPPINGS = {name: node.TITLE for name, node in NODE_CLASS_MAPPINGS.items()}
