"""What the kernels of precision int8_fp4 compute: fp4_model.py with Q and K in INT8."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from .formats import INT8_MAX
from .fp4_layout import BLOCK_KEYS, Int8KvCodes, int8_scale_of_keys
from .fp4_model import (
    LOG2_E,
    NVFP4_MAX,
    RANGE,
    SMALLEST_FACTOR,
    dequantise_blocks,
    in_blocks,
    quantise_blocks,
    smooth,
)
from .sampling import sampled_mean
from .smoothing import hadamard

SMALLEST_AMAX = 1e-36  # rows.cuh
LARGEST_FACTOR = 1 / 64  # LARGEST_INT8_FACTOR of int8_scores.cuh


class Int8Operands(NamedTuple):
    """Q, K and V as the attention kernel reads them.

    q [B, Hq, Nq, D] and k [B, Hk, keys, D]: integers; q_scales [B, Hq, Nq], times the softmax scale
    and log2(e), and k_scales [B, Hk, keys]. The rest as in ``fp4_model.Operands``.
    """

    q: torch.Tensor
    q_scales: torch.Tensor
    k: torch.Tensor
    k_scales: torch.Tensor
    v: torch.Tensor
    kv_scales: torch.Tensor
    v_means: torch.Tensor
    kv_len: int

    magic = 1.5 * 2.0**23
    delta = None

    def factors(self, keys: slice) -> torch.Tensor:
        """From scores to exponents of two: FP32 [B, Hq, Nq, keys]."""
        group = self.q.shape[1] // self.k.shape[1]
        limit = LARGEST_FACTOR / self.kv_scales[..., 0].repeat_interleave(group, 1)
        q_scales = torch.minimum(self.q_scales, limit[..., None])[..., None]
        k_scales = self.k_scales[..., keys].repeat_interleave(group, 1)[:, :, None]
        return (q_scales * k_scales).clamp_min(SMALLEST_FACTOR)


def quantise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    live: torch.Tensor | None = None,
) -> tuple[Int8KvCodes, Int8Operands]:
    """Codes and operands of q [B, Hq, Nq, D] and k, v [B, Hk, Nk, D], any float dtype.

    live: bool [B|1, Hk|1, Nk], the keys that count; None: all.
    """
    q, k, v = (x.float() * RANGE for x in (q, k, v))
    (batch, heads, kv_len, head_dim), missing = k.shape, -k.shape[2] % (2 * BLOCK_KEYS)
    root = (head_dim & -head_dim) ** 0.5
    rotation = hadamard(head_dim, q.device).double() * root
    to_scale = _float32(1 / (INT8_MAX * RANGE * root))
    q, k = ((x.double() @ rotation).float() for x in (q, k))
    live = torch.ones(1, 1, kv_len, dtype=torch.bool, device=q.device) if live is None else live
    live = live.expand(batch, heads, kv_len)

    q_amax = q.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX)
    q_codes = _round(q * math.copysign(1.0, scale), q_amax)
    q_scales = q_amax.squeeze(-1) * to_scale * abs(_float32(scale * LOG2_E))

    k = (k - sampled_mean(k, live)).masked_fill(~live[..., None], 0.0)
    k = F.pad(k, (0, 0, 0, missing)).unflatten(2, (-1, BLOCK_KEYS))
    which = int8_scale_of_keys().to(k.device)
    amax = k.abs().amax(-1)
    amax = torch.stack([amax[..., which == t].amax(-1) for t in range(4)], -1)
    amax = amax.clamp_min(SMALLEST_AMAX)
    k_codes = _round(k, amax[..., which, None])
    k_scales = amax * to_scale

    v, v_mean, v_amax = smooth(v, live)
    v_scaled = F.pad(v * (torch.full_like(v_amax, NVFP4_MAX) / v_amax), (0, 0, 0, missing))
    v_codes, v_scales = quantise_blocks(v_scaled.mT.contiguous())
    v_size = v_amax.flatten(2) * _float32(1 / (NVFP4_MAX * RANGE))
    codes = Int8KvCodes(k_codes.to(torch.int8), k_scales, *in_blocks(v_codes, v_scales))
    return codes, Int8Operands(
        q=q_codes,
        q_scales=q_scales,
        k=k_codes.flatten(2, 3),
        k_scales=k_scales[..., which].flatten(2),
        v=dequantise_blocks(v_codes, v_scales),
        kv_scales=torch.cat([k_scales.amax((2, 3))[..., None], v_size], -1),
        v_means=v_mean.squeeze(2) / RANGE,
        kv_len=kv_len,
    )


def _round(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Integers, FP32: FP64's product is exact, so that rounding happens once, as in an FFMA."""
    return (x.double() * (torch.full_like(amax, INT8_MAX) / amax).double()).round().float()


def _float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()
