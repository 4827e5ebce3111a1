"""The plan's widgets, shared by every node that patches a model, and what they are checked for."""

from typing import Any

import torch

from ..kernels import capabilities
from .engine.layer_strip import layer_strip
from .engine.layout import describe_model
from .engine.override import install
from .engine.plan import CROSS_ATTENTION, CUSTOM, PRESETS, make_plan
from .engine.profile import TYPE as PROFILE_TYPE
from .engine.profile import Profile, ProfileError, require_profile
from .engine.words import shorten
from .profiles import MAX_ERROR, NONE, load_named, missing, names, state_of

# In the order of speed gained for accuracy lost, mildest first: the order of the menu.
PRECISION_MENU = ["int8", "fp4", "int8_fp4", "fp16"]

PLAN_WIDGETS = {
    "preset": (
        [*PRESETS, CUSTOM],
        {
            "default": "balanced",
            "tooltip": "How much accuracy to trade for speed. balanced: int8 everywhere. quality: "
            "int8, but the first and last block stay in fp16. speed: fp4 where this GPU has it, "
            "else int8; first and last block and the ends of sampling stay in fp16. custom: the "
            "precision and start/end widgets below decide.",
        },
    ),
    "precision": (
        PRECISION_MENU,
        {
            "default": "int8",
            "tooltip": "Only for preset custom. int8: close to fp16. fp4: fastest, needs an "
            "RTX 50 or other Blackwell GPU. int8_fp4: in between. fp16: ComfyUI's own attention, "
            "to compare with.",
        },
    ),
    "fp16_layers": (
        "STRING",
        {
            "default": "",
            "tooltip": "Layers to keep in fp16, in every preset. Examples: double.0-2 | single.* | "
            "first 2, last 3 | *.cross | block.5.self. The report node shows the names of your "
            "model's layers. Empty: no exceptions.",
        },
    ),
    "start_percent": (
        "FLOAT",
        {
            "default": 0.0,
            "min": 0.0,
            "max": 1.0,
            "step": 0.001,
            "tooltip": "Only for preset custom. Part of sampling that passes in fp16 before "
            "quantised attention starts: 0 is the first step, 0.1 leaves out the first tenth.",
        },
    ),
    "end_percent": (
        "FLOAT",
        {
            "default": 1.0,
            "min": 0.0,
            "max": 1.0,
            "step": 0.001,
            "tooltip": "Only for preset custom. Part of sampling after which attention goes back "
            "to fp16: 1 is the last step, 0.9 leaves out the last tenth.",
        },
    ),
    "cross_attention": (
        list(CROSS_ATTENTION),
        {
            "default": "fp16",
            "tooltip": "Attention from image to prompt, in models that have it as a separate "
            "layer. It is cheap, and prompts are easily hurt: fp16 is the safe choice. same: "
            "quantise it like the rest.",
        },
    ),
    "min_tokens": (
        "INT",
        {
            "default": 1024,
            "min": 0,
            "max": 1 << 20,
            "tooltip": "Attention over fewer tokens than this stays in fp16: quantising it would "
            "cost more time than it saves, and accuracy.",
        },
    ),
    "emulation": (
        "BOOLEAN",
        {
            "default": False,
            "tooltip": "For judging quality without the right GPU: compute the chosen precision "
            "in plain PyTorch where no kernel exists for it here. The picture is right, the speed "
            "is not: this is slow. Off: such calls stay with ComfyUI's own attention.",
        },
    ),
    "enabled": (
        "BOOLEAN",
        {"default": True, "tooltip": "Off: the model passes through untouched."},
    ),
}


def profile_inputs() -> dict:
    """Optional inputs; always last, since workflows store values by position."""
    return {
        "profile": (
            PROFILE_TYPE,
            {
                "tooltip": "Measured errors of this model's layers, from SageAttention3 Calibrate "
                "or Load Profile. With one, max_error decides in the place of preset, precision, "
                "start_percent and end_percent; the other widgets stay."
            },
        ),
        "max_error": MAX_ERROR,
        "profile_name": (
            [NONE, *names()],
            {
                "default": NONE,
                "tooltip": "A saved profile of this model, in the place of a connected one. none: "
                "the preset decides.",
            },
        ),
    }


class PatchingNode:
    """What the host asks of a node with these widgets and inputs before it runs."""

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


def check_choices(
    profile: Any = None, profile_name: str | None = None, **chosen: Any
) -> bool | str:
    """For VALIDATE_INPUTS: True, or what is wrong with a menu's value and what it may be.

    The host's own message for a value from another version of the pack names no way out, and an
    input of a type of ours it lets through unseen.
    """
    if profile is not None:
        try:
            require_profile(profile)
        except ProfileError as error:
            return str(error)
    if profile_name not in (None, NONE) and (fault := missing(profile_name)):
        return f"profile_name: {fault}"
    for name, value in chosen.items():
        menu = PLAN_WIDGETS[name][0]
        if value is not None and value not in menu:  # None: comes from a link, known only later
            return (
                f"{name} is {shorten(repr(value))}, which this version does not have. "
                f"Choose {', '.join(menu)}."
            )
    return True


def patch_model(
    model: Any,
    *,
    enabled: bool,
    profile: Any = None,
    max_error: float = MAX_ERROR[1]["default"],
    profile_name: str = NONE,
    **settings: Any,
) -> dict[str, Any]:
    """A node's answer: ``model`` (ModelPatcher) patched as the widgets say, a strip of its layers.

    The answer is ``model`` itself, without a strip, if not ``enabled``.

    Raises PlanError, SelectorError or ProfileError for settings that don't fit the model,
    RuntimeError on a host without attention overrides.
    """
    if not enabled:
        return {"result": (model,)}
    _require_overrides()
    layout = describe_model(model.get_model_object("diffusion_model"))
    if profile_name != NONE:
        if profile is not None:
            raise ProfileError(
                f"there are two profiles, one connected and `{shorten(profile_name)}` by name: "
                "disconnect the one, or set profile_name to none"
            )
        profile = load_named(profile_name)
    if profile is not None:
        require_profile(profile).check(model)
        settings |= {
            "profile": profile,
            "max_error": max_error,
            "candidates": _candidates(model.load_device, profile, settings["emulation"]),
        }
    plan = make_plan(layout, **settings)
    strip = layer_strip(plan, layout, settings["fp16_layers"], profile)
    return {"result": (install(model, plan, layout),), "ui": {"layers": strip}}


def _candidates(device: torch.device, profile: Profile, emulation: bool) -> tuple[str, ...]:
    """The precisions that a budget may choose from: those that run on ``device``.

    Where none does, all of them: then the report says of each call why it stayed with the host.
    """
    usable = {row.precision for row in capabilities(device) if row.usable and row.native}
    return tuple(p for p in profile.precisions if emulation or not usable or p in usable)


def _require_overrides() -> None:
    from comfy.ldm.modules import attention

    if not hasattr(attention, "wrap_attn"):
        raise RuntimeError(
            "This ComfyUI has no attention overrides, which SageAttention3 needs. "
            "Update ComfyUI to version 0.3.60 or newer."
        )
