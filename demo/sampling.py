"""Runs tiny models in this process through the host's own code: one forward pass, or a sampler.

Tests use it where a server would only be slower. Call ``host.import_comfy`` first.
"""

import math
from typing import Any

import torch

from ..nodes.calibrate import CANDIDATES
from ..nodes.engine.allowance import Allowance
from ..nodes.engine.calibration import Calibration
from ..nodes.engine.fingerprint import fingerprint
from ..nodes.engine.layout import describe_model
from ..nodes.engine.ledger import Run
from ..nodes.engine.override import find_session
from ..nodes.engine.profile import Origin, Profile, make_profile
from ..nodes.engine.watch import watch_model
from ..nodes.patch import SageAttention3Patch
from . import tiny
from .families import FAMILIES

# Families that `sample` can't: they want an image or a text that nodes of the host prepare.
UNSAMPLED = ("svd", "hidream", "omnigen2")
SAMPLED = tuple(name for name in FAMILIES if name not in UNSAMPLED)

# Every call quantised, on any machine: what tiny models need, and tests vary.
EVERYTHING = {
    "preset": "custom",
    "precision": "int8",
    "fp16_layers": "",
    "start_percent": 0.0,
    "end_percent": 1.0,
    "cross_attention": "same",
    "min_tokens": 0,
    "emulation": True,
    "enabled": True,
}


def patched(model: Any, **settings: Any) -> Any:
    """``model`` as the patch node returns it; ``settings`` over ``EVERYTHING``."""
    (model,) = SageAttention3Patch().patch(model, **{**EVERYTHING, **settings})["result"]
    return model


def last_run(model: Any) -> Run:
    """What the last run of a patched model did."""
    return find_session(model).ledger.runs[-1]


def forward(model: Any, family: str, sigma: float = 0.5, **options: Any) -> torch.Tensor:
    """One pass of ``model`` (ModelPatcher) over the family's inputs; as :func:`apply`."""
    x, conditions = tiny.inputs(family)
    return apply(model, x, sigma, conditions, **options)


def apply(
    model: Any, x: torch.Tensor, sigma: float, conditions: dict[str, Any], **options: Any
) -> torch.Tensor:
    """One pass of ``model`` (ModelPatcher) over ``x``, as the sampler would call it.

    conditions: keyword arguments of ``apply_model``. options: further transformer_options. The
    sampler's callbacks (pre-run, clean-up) stay uncalled.
    """
    from comfy.patcher_extension import merge_nested_dicts

    t = torch.full((x.shape[0],), sigma)
    merged = merge_nested_dicts({}, model.model_options.get("transformer_options", {}))
    merged["wrappers"] = merge_nested_dicts(merged.get("wrappers", {}), model.wrappers)
    merged |= {"sigmas": t, "cond_or_uncond": [0], **options}
    with torch.inference_mode():
        return model.model.apply_model(x, t, transformer_options=merged, **conditions)


def sample(
    model: Any,
    family: str,
    *,
    steps: int = 2,
    cfg: float = 1.0,
    sampler: str = "euler",
    seed: int = 0,
    latent: tuple[int, ...] = (),
    positive: list | None = None,
    negative: list | None = None,
    **settings: Any,
) -> torch.Tensor:
    """The host's sampler on an empty latent.

    latent: shape without batch, the family's own if empty. positive, negative: conditioning, the
    family's own if None. settings: those of comfy.sample.sample.
    """
    import comfy.sample

    shape = (1, *(latent or FAMILIES[family].latent))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        return comfy.sample.sample(
            model,
            noise,
            steps,
            cfg,
            sampler,
            "simple",
            positive or tiny.conditioning(family, 1),
            negative or tiny.conditioning(family, 2),
            torch.zeros(shape),
            disable_pbar=True,
            **settings,
        )


def calibrated(model: Any, family: str, **settings: Any) -> tuple[Profile, torch.Tensor]:
    """The profile of ``model`` with every call measured, however long it takes, and the latent.

    settings: those of :func:`sample`.
    """
    layout = describe_model(model.model.diffusion_model)
    calibration = Calibration(CANDIDATES, emulation=True, allowance=Allowance(math.inf))
    latent = sample(watch_model(model, calibration, layout), family, **settings)
    origin = Origin(layout.family, fingerprint(model), tuple(latent.shape[1:]), "CPU", "")
    return make_profile(calibration.record, origin), latent


def train(
    model: Any,
    family: str,
    *,
    steps: int = 2,
    dtype: str = "bf16",
    gradient_checkpointing: bool = True,
    seed: int = 0,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The host's LoRA training node on two random latents. Returns the LoRA and the losses.

    Two, since host 0.3.75 fails on a single latent.
    """
    from comfy_extras.nodes_train import TrainLoraNode

    generator = torch.Generator().manual_seed(seed)
    shape = (1, *FAMILIES[family].latent)
    settings = {
        "batch_size": 1,
        "grad_accumulation_steps": 1,
        "steps": steps,
        "learning_rate": 1e-3,
        "rank": 4,
        "optimizer": "SGD",
        "loss_function": "MSE",
        "seed": seed,
        "training_dtype": dtype,
        "lora_dtype": "fp32",
        "algorithm": "LoRA",
        "gradient_checkpointing": gradient_checkpointing,
        "existing_lora": "[None]",
    }
    torch.manual_seed(seed)  # the node draws its noise levels from the global generator
    with torch.inference_mode():
        result = TrainLoraNode.execute(
            model=[model],
            latents=[{"samples": torch.randn(shape, generator=generator)} for _ in range(2)],
            positive=[tiny.conditioning(family)],
            **{name: [value] for name, value in settings.items()},
        )
    _, lora, losses, _ = result.args
    return lora, losses["loss"]
