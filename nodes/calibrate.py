"""The nodes that measure what each layer of a model would lose in each precision."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..kernels import PRECISIONS
from .engine import profile_file
from .engine.calibration import Calibration
from .engine.fingerprint import fingerprint
from .engine.layout import Layout, describe_model
from .engine.profile import TYPE, Origin, Profile, ProfileError, make_profile
from .engine.watch import watch_guider, watch_model
from .profiles import MAX_ERROR, check_name, path_of, show_profile

log = logging.getLogger("sageattention3")

PARTIAL = " (partial)"  # added to the name of what an interrupted run has measured
CANDIDATES = tuple(precision for precision in PRECISIONS if precision != "fp16")

# Last in both nodes, after what the sampling needs.
_WIDGETS = {
    "name": (
        "STRING",
        {
            "default": "my model",
            "tooltip": "The profile is saved under this name, for the menus of SageAttention3 "
            "Patch and Load Profile. A profile of that name is replaced; an interrupted run saves "
            "what it has beside it.",
        },
    ),
    "max_error": (
        MAX_ERROR[0],
        {
            **MAX_ERROR[1],
            "tooltip": "For the chart and the report of this node: how far the final latent may "
            "be from full precision's, as relative L1. To try others without measuring again, use "
            "SageAttention3 Load Profile.",
        },
    ),
    "emulation": (
        "BOOLEAN",
        {
            "default": True,
            "tooltip": "Also measure precisions for which this machine has no kernel, in plain "
            "PyTorch: the profile then serves machines that have one. Off: only what runs here.",
        },
    ),
}


class _Calibrate:
    CATEGORY = "SageAttention3"
    RETURN_TYPES = (TYPE, "IMAGE", "STRING", "LATENT")
    RETURN_NAMES = ("profile", "chart", "report", "samples")
    OUTPUT_TOOLTIPS = (
        "For the profile input of SageAttention3 Patch.",
        "Layers by precision: what each would cost, and what max_error chooses.",
        "The choice in words, what keeping a few layers in fp16 does, the worst layers.",
        "What full precision samples: measuring changes nothing. To compare with.",
    )
    OUTPUT_NODE = True
    FUNCTION = "calibrate"

    @classmethod
    def VALIDATE_INPUTS(cls, name=None):  # noqa: N802
        return check_name(name)


class SageAttention3Calibrate(_Calibrate):
    TITLE = "SageAttention3 Calibrate"
    DESCRIPTION = (
        "Samples once at full precision and measures on the way what each layer would lose in int8 "
        "and fp4. Takes at most 2.5 times as long as the sampling alone. Use the model, size and "
        "settings that you work with; once per model is enough."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        from comfy.samplers import KSampler  # names as in ComfyUI's own sampler node

        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to measure, with its LoRAs."}),
                "seed": (
                    "INT",
                    {
                        "default": 0,
                        "min": 0,
                        "max": 0xFFFFFFFFFFFFFFFF,
                        "control_after_generate": False,  # one more run would measure again
                        "tooltip": "Of the noise. Any will do: errors hardly depend on it.",
                    },
                ),
                "steps": (
                    "INT",
                    {
                        "default": 20,
                        "min": 1,
                        "max": 10000,
                        "tooltip": "As many as you work with. With fewer than about 8 there may "
                        "be too little time to measure everything.",
                    },
                ),
                "cfg": (
                    "FLOAT",
                    {
                        "default": 8.0,
                        "min": 0.0,
                        "max": 100.0,
                        "step": 0.1,
                        "round": 0.01,
                        "tooltip": "Guidance, as in the sampler that you use.",
                    },
                ),
                "sampler_name": (KSampler.SAMPLERS, {"tooltip": "As in the sampler that you use."}),
                "scheduler": (KSampler.SCHEDULERS, {"tooltip": "As in the sampler that you use."}),
                "positive": ("CONDITIONING", {"tooltip": "A prompt of the kind that you use."}),
                "negative": ("CONDITIONING", {"tooltip": "The negative prompt that goes with it."}),
                "latent_image": ("LATENT", {"tooltip": "Of the size that you work with."}),
                "denoise": (
                    "FLOAT",
                    {
                        "default": 1.0,
                        "min": 0.0,
                        "max": 1.0,
                        "step": 0.01,
                        "tooltip": "1 samples from pure noise, as for a new picture.",
                    },
                ),
                **_WIDGETS,
            }
        }

    def calibrate(
        self,
        model: Any,
        latent_image: dict,
        name: str,
        max_error: float,
        emulation: bool,
        **settings: Any,
    ) -> dict:
        def sample(calibration: Calibration, layout: Layout) -> dict:
            from nodes import common_ksampler  # ComfyUI's nodes.py

            watched = watch_model(model, calibration, layout)
            [latent] = common_ksampler(watched, latent=latent_image, **settings)
            return latent

        profile, latent = _measure(model, latent_image, name, emulation, sample)
        return _answer(profile, latent, max_error)


class SageAttention3CalibrateGuider(_Calibrate):
    TITLE = "SageAttention3 Calibrate (guider)"
    DESCRIPTION = (
        "SageAttention3 Calibrate with the inputs of SamplerCustomAdvanced, for graphs that sample "
        "with a guider and sigmas of their own."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {
            "required": {
                "noise": ("NOISE", {"tooltip": "As for SamplerCustomAdvanced."}),
                "guider": ("GUIDER", {"tooltip": "Holds the model to measure, and its guidance."}),
                "sampler": ("SAMPLER", {"tooltip": "As for SamplerCustomAdvanced."}),
                "sigmas": ("SIGMAS", {"tooltip": "The steps that you work with."}),
                "latent_image": ("LATENT", {"tooltip": "Of the size that you work with."}),
                **_WIDGETS,
            }
        }

    def calibrate(
        self,
        noise: Any,
        guider: Any,
        sampler: Any,
        sigmas: torch.Tensor,
        latent_image: dict,
        name: str,
        max_error: float,
        emulation: bool,
    ) -> dict:
        def sample(calibration: Calibration, layout: Layout) -> dict:
            from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced

            watched = watch_guider(guider, calibration, layout)
            run = getattr(SamplerCustomAdvanced, "execute", None) or SamplerCustomAdvanced().sample
            return run(noise, watched, sampler, sigmas, latent_image)[0]

        profile, latent = _measure(guider.model_patcher, latent_image, name, emulation, sample)
        return _answer(profile, latent, max_error)


def _measure(
    model: Any,
    latent: dict,
    name: str,
    emulation: bool,
    sample: Callable[[Calibration, Layout], dict],
) -> tuple[Profile, dict]:
    """The saved profile, and what was sampled. ``sample`` runs the host's sampler, watched.

    Raises ProfileError if nothing could be measured, whatever ``sample`` raises, and RuntimeError
    on a host that is too old.
    """
    path = path_of(name)
    layout = describe_model(model.get_model_object("diffusion_model"))
    calibration = Calibration(CANDIDATES, emulation=emulation)
    device = model.load_device
    origin = Origin(
        family=layout.family,
        fingerprint=fingerprint(model),
        shape=tuple(latent["samples"].shape[1:]),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper(),
        pack_version=_pack_version(),
    )
    try:
        out = sample(calibration, layout)
    except BaseException:  # the host's interrupt among others
        _save_partial(calibration, origin, path)
        raise
    profile = make_profile(calibration.record, origin)
    profile_file.save(profile, path)
    return profile, out


def _save_partial(calibration: Calibration, origin: Origin, path: Path) -> None:
    beside = path.with_name(f"{path.stem[:80]}{PARTIAL}{path.suffix}")  # still a name
    try:
        profile_file.save(make_profile(calibration.record, origin), beside)
    except ProfileError as error:
        log.info("calibration broken off: %s", error)
    else:
        log.info("calibration broken off; what was measured is the profile `%s`", beside.stem)


def _answer(profile: Profile, latent: dict, max_error: float) -> dict:
    ui, chart, text = show_profile(profile, max_error)
    return {"ui": ui, "result": (profile, chart, text, latent)}


def _pack_version() -> str:
    text = Path(__file__).parent.parent.joinpath("pyproject.toml").read_text("utf-8")
    return re.search(r'^version = "(.+)"$', text, re.M)[1]
