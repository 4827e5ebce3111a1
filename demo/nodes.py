"""Nodes of the demo host: a tiny model, and conditioning without a text encoder."""

from typing import Any

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


NODE_CLASS_MAPPINGS = {
    node.__name__: node for node in (SageAttention3DemoModel, SageAttention3DemoConditioning)
}
NODE_DISPLAY_NAME_MAPPINGS = {name: node.TITLE for name, node in NODE_CLASS_MAPPINGS.items()}
