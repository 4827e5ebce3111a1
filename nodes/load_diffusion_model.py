"""ComfyUI's diffusion model loader with the patch built in."""

from typing import Any

from .widgets import PLAN_WIDGETS, PatchingNode, patch_model, profile_inputs


class SageAttention3LoadDiffusionModel(PatchingNode):
    TITLE = "Load Diffusion Model (SageAttention3)"
    CATEGORY = "SageAttention3"
    DESCRIPTION = "Loads a diffusion model as ComfyUI's own loader does, and patches its attention."
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The loaded and patched model.",)
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {
            "required": {**_host_loader().INPUT_TYPES()["required"], **PLAN_WIDGETS},
            "optional": profile_inputs(),
        }

    def load(self, unet_name: str, weight_dtype: str, **settings: Any) -> dict[str, Any]:
        (model,) = _host_loader()().load_unet(unet_name, weight_dtype)
        return patch_model(model, **settings)


def _host_loader() -> type:
    from nodes import UNETLoader  # ComfyUI's nodes.py, which must not be imported before it is

    return UNETLoader
