"""The node that patches a loaded MODEL."""

from typing import Any

from .widgets import PLAN_WIDGETS, PatchingNode, patch_model, profile_inputs


class SageAttention3Patch(PatchingNode):
    TITLE = "SageAttention3 Patch"
    CATEGORY = "SageAttention3"
    DESCRIPTION = (
        "Runs the model's attention in int8 or fp4, layer by layer, step by step. Put it last "
        "among the nodes that change the model. SageAttention3 Report shows what ran where."
    )
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The patched model. The model that came in stays as it was.",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        model = ("MODEL", {"tooltip": "The diffusion model to speed up."})
        return {"required": {"model": model, **PLAN_WIDGETS}, "optional": profile_inputs()}

    def patch(self, model: Any, **settings: Any) -> dict[str, Any]:
        return patch_model(model, **settings)
