"""Nodes of the demo host: a tiny model, and conditioning without a text encoder."""

from typing import Any

import torch

from .families import FAMILIES
from .tiny import model, text_mask


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
        return {
            "required": {
                "tokens": ("INT", {"default": 24, "min": 1, "max": 4096}),
                "channels": ("INT", {"default": 64, "min": 1, "max": 16384}),
                "pooled": ("INT", {"default": 0, "min": 0, "max": 8192}),
                "masked": ("BOOLEAN", {"default": False}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**32 - 1}),
            }
        }

    def make(self, tokens: int, channels: int, pooled: int, masked: bool, seed: int) -> tuple[list]:
        generator = torch.Generator().manual_seed(seed)
        options = {}
        if pooled:
            options["pooled_output"] = torch.randn(1, pooled, generator=generator)
        if masked:
            options["attention_mask"] = text_mask(tokens)
        return ([[torch.randn(1, tokens, channels, generator=generator), options]],)


NODE_CLASS_MAPPINGS = {
    node.__name__: node for node in (SageAttention3DemoModel, SageAttention3DemoConditioning)
}
NODE_DISPLAY_NAME_MAPPINGS = {name: node.TITLE for name, node in NODE_CLASS_MAPPINGS.items()}
