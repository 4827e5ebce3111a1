"""The demo's video model: ComfyUI's own HunyuanVideo class, small enough to ship.

Needs ``host.import_comfy`` first.
"""

from itertools import pairwise
from typing import Any

import torch

from .words import CHANNELS, POOLED

FRAMES = 9  # of a clip; with SIZE / 8 tokens both ways and five words, 2,309 tokens
# What ``UNETLoader`` reads from the file, or takes for granted (heads of 128 channels, mlp_ratio).
WIDTHS: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "vec_in_dim": POOLED,
    "context_in_dim": CHANNELS,
    "hidden_size": 256,
    "num_heads": 2,
    "mlp_ratio": 4.0,
    "depth": 1,
    "depth_single_blocks": 3,
    "axes_dim": [16, 56, 56],
    "theta": 256,
    "qkv_bias": True,
    "guidance_embed": False,
    "byt5": False,
    "meanflow": False,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
}
TIMESTEPS = 1000.0  # the host gives the model its noise level times this


def build(device: torch.device, seed: int, **widths: Any) -> torch.nn.Module:
    """An untrained model in FP32. widths: over WIDTHS."""
    from comfy.ldm.hunyuan_video.model import HunyuanVideo
    from comfy.ops import disable_weight_init

    class Operations(disable_weight_init):
        class LayerNorm(disable_weight_init.LayerNorm):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                # The host's blocks change x in place later on, and the gradient needs it as it is.
                return super().forward(x.clone())

    model = HunyuanVideo(
        dtype=torch.float32,
        device=device,
        operations=Operations,
        **{**WIDTHS, **widths},
    )
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        parameter.data.copy_(_first_value(key, parameter, generator))
    # Positions are the same for all of a batch; the host would compute them for each, in FP64.
    model.pe_embedder.register_forward_pre_hook(lambda _module, given: (given[0][:1],))
    return model


def _first_value(key: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # Modulation starts at nothing, so that each block begins as the identity.
    if any(part in key for part in ("_mod.", "modulation.", "final_layer.linear")):
        return torch.zeros(like.shape)
    if like.ndim >= 2:
        return torch.randn(like.shape, generator=generator) * like[0].numel() ** -0.5
    return torch.zeros(like.shape) if key.endswith("bias") else torch.ones(like.shape)


def velocity(
    model: torch.nn.Module,
    x: torch.Tensor,
    sigma: torch.Tensor,
    context: torch.Tensor,
    pooled: torch.Tensor,
) -> torch.Tensor:
    """The model's estimate of noise - latent. x: [B, 16, T, H, W], noised to sigma: [B]."""
    return model(x, sigma * TIMESTEPS, context, pooled, transformer_options={})


def shifted(u: torch.Tensor, shift: float) -> torch.Tensor:
    """Noise levels of evenly spread ``u``, moved towards noise: the host's own ``shift``."""
    return shift * u / (1 + (shift - 1) * u)


@torch.no_grad()
def euler(
    model: torch.nn.Module,
    noise: torch.Tensor,
    context: torch.Tensor,
    pooled: torch.Tensor,
    steps: int,
    shift: float,
) -> torch.Tensor:
    """Model-scale latents from noise, by the host's ``euler`` sampler on evenly spread levels."""
    sigmas = shifted(torch.linspace(1, 0, steps + 1, device=noise.device), shift)
    x = noise
    for sigma, lower in pairwise(sigmas):
        slope = velocity(model, x, sigma.expand(len(x)), context, pooled)
        x = x + (lower - sigma) * slope.float()
    return x
