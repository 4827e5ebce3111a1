"""The node that patches a loaded MODEL."""

from typing import Any

from .profiles import NONE, state_of
from .widgets import PLAN_WIDGETS, check_choices, patch_model, profile_inputs


class SageAttention3Patch:
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

    @classmethod
    def VALIDATE_INPUTS(  # noqa: N802
        cls,
        preset=None,
        precision=None,
        cross_attention=None,
        profile=None,
        profile_name=None,
    ):
        return check_choices(
            profile,
            profile_name,
            preset=preset,
            precision=precision,
            cross_attention=cross_attention,
        )

    @classmethod
    def IS_CHANGED(cls, profile_name=NONE, **_: Any) -> str:  # noqa: N802
        return state_of(profile_name)

    def patch(self, model: Any, **settings: Any) -> dict[str, Any]:
        return patch_model(model, **settings)
