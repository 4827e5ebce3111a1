"""What the NVFP4 kernels compute, step by step: their rounding, their order, their constants.

``reference_attention`` says what the scheme ``fp4`` is; this says what kernels/cuda makes of it, so
closely that a kernel's output differs by its approximate exp2 and log2 and by the order of its sums
alone. Such differences move a code now and then, and with it a row by a few percent.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from .formats import (
    E2M1_MAX,
    E4M3_MAX,
    NVFP4_BLOCK,
    SEARCH_TARGETS,
    decode_e2m1,
    encode_e2m1,
    nonzero_scale,
    round_e2m1,
    round_e4m3,
)
from .fp4_layout import BLOCK_KEYS, KvCodes, k_dim
from .sampling import sampled_deviation
from .smoothing import balance_of, hadamard

RANGE = 1 / 256  # kernels/cuda/rows.cuh
NVFP4_MAX = E4M3_MAX * E2M1_MAX
SMALLEST_AMAX = 1e-35
SMALLEST_NORM = 1e-33
SMALLEST_DEVIATION = 1 / 4096  # of a block of Q, beside its mean
LARGEST_EXPONENT, SMALLEST_FACTOR = 2.0**22, 1e-37
FLOAT_MAX = torch.finfo(torch.float32).max
LOG2_E = 1.4426950408889634
REFERENCE_SLACK = 2.0
LOG2_P_UNIT = 9.392317423  # log2(NVFP4_MAX) - REFERENCE_SLACK
LOG2_E2M1_MAX = 2.584962501
WARP_ROWS = 16


class Operands(NamedTuple):
    """Q, K and V as the attention kernel reads them in NVFP4; in INT8: int8_fp4_model.py.

    q [B, Hq, Nq, k_dim], k [B, Hk, keys, k_dim] and v [B, Hk, D, keys]: codes times block scales,
    keys filled up with zeros to whole blocks. q_factors [B, Hq, q_blocks, 2]: scale times softmax
    scale and log2(e), and the limit of scores' factor. kv_scales [B, Hk, 2]; v_means [B, Hk, D].
    delta [B, Hq, q_blocks, keys]: the scores that smoothing took from Q, in the units of q and k;
    None without. kv_len: keys that exist.
    """

    q: torch.Tensor
    q_factors: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_scales: torch.Tensor
    v_means: torch.Tensor
    delta: torch.Tensor | None
    q_block_tokens: int
    kv_len: int

    magic = 0.0  # what scores stand beside, as the kernel holds them

    def factors(self, keys: slice) -> torch.Tensor:
        """From scores to exponents of two: FP32 [B, Hq, Nq, 1], the same for all keys."""
        group = self.q.shape[1] // self.k.shape[1]
        kv_scales = self.kv_scales.repeat_interleave(group, 1)
        factor = self.q_factors[..., :1] * kv_scales[..., None, :1]
        factor = torch.minimum(factor, self.q_factors[..., 1:]).clamp_min(SMALLEST_FACTOR)
        return self.per_row(factor)

    def per_row(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, Hq, q_blocks, ...] for each query of its block: [B, Hq, Nq, ...]."""
        return x.repeat_interleave(self.q_block_tokens, 2)[:, :, : self.q.shape[2]]


class Codes(NamedTuple):
    """What the quantising kernels write: Q's codes and scales per token, K's and V's per block."""

    q: torch.Tensor  # [B, Hq, Nq, k_dim]
    q_scales: torch.Tensor  # [B, Hq, Nq, k_dim / 16]
    kv: KvCodes  # [B, Hk, blocks, ...]


# ------------------------------------------------------------------------------------- quantising
def quantise_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, E4M3 codes of scales) of FP32 ``x`` [..., n] as ``quantise_block`` of nvfp4.cuh."""
    blocks = _f16(x).unflatten(-1, (-1, NVFP4_BLOCK))
    sizes = blocks.abs()
    amax = sizes.amax(-1, keepdim=True)
    lowest = torch.full_like(amax, FLOAT_MAX)
    scale, divisor = torch.zeros_like(amax), torch.ones_like(amax)
    for target in SEARCH_TARGETS:
        candidate = round_e4m3(amax * _float32(1.0 / _float32(target)))
        unit = nonzero_scale(candidate)
        inverse = _f16(1.0 / unit)
        error = _squared_error(_f16(sizes * inverse)) * unit * unit
        better = error < lowest
        lowest = torch.where(better, error, lowest)
        scale, divisor = (
            torch.where(better, candidate, scale),
            torch.where(better, inverse, divisor),
        )
    rounded = round_e2m1(_f16(_f16(sizes * divisor) * 2.0**-14) * 2.0**14)
    codes = encode_e2m1(rounded.copysign(blocks)).flatten(-2)
    return codes, scale.squeeze(-1).to(torch.float8_e4m3fn).view(torch.uint8)


def _squared_error(x: torch.Tensor) -> torch.Tensor:
    """Of ``x`` [..., 16], FP16 in FP32 and none negative, to E2M1: in the kernel's steps."""
    bits = (x * 2.0**-14).half().view(torch.int16)
    rounded = ((bits + 0x100) & ~0x1FF).view(torch.half).float() * 2.0**14
    off = (x - rounded).unflatten(-1, (2, 2, 4)).double()  # value = 8 a + 4 half + i
    halves = torch.zeros_like(off[..., 0, :, 0])
    for a in range(2):
        for i in range(4):
            halves = _f16(off[..., a, :, i].square() + halves).double()
    return halves.float().sum(-1, keepdim=True)


def dequantise_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP32 [..., n] of codes [..., n] and E4M3 codes [..., n / 16]."""
    blocks = decode_e2m1(codes).unflatten(-1, (-1, NVFP4_BLOCK))
    return (blocks * scales.view(torch.float8_e4m3fn).float()[..., None]).flatten(-2)


def quantise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    q_block_tokens: int,
    smooth_q: bool = True,
    live: torch.Tensor | None = None,
) -> tuple[Codes, Operands]:
    """Codes and operands of q [B, Hq, Nq, D] and k, v [B, Hk, Nk, D], any float dtype.

    live: bool [B|1, Hk|1, Nk], the keys that count; None: all.
    """
    q, k, v = (x.float() * RANGE for x in (q, k, v))
    head_dim, q_len, kv_len = q.shape[-1], q.shape[2], k.shape[2]
    sign = math.copysign(1.0, scale)
    q_blocks = -(-q_len // q_block_tokens)
    blocks = F.pad(q, (0, 0, 0, q_blocks * q_block_tokens - q_len))
    blocks = blocks.unflatten(2, (q_blocks, q_block_tokens))
    exists = torch.arange(q_blocks * q_block_tokens, device=q.device) < q_len
    exists = exists.view(q_blocks, q_block_tokens, 1)
    mean = blocks.double().sum(3, keepdim=True) / exists.sum(1, keepdim=True)
    mean = mean.float() if smooth_q else torch.zeros_like(mean).float()
    deviation = (blocks - mean).masked_fill(~exists, 0.0)
    balance = _balance(q, k, live)
    k, _, k_size = smooth(k, live)
    rotation = hadamard(head_dim, q.device).double() * _root(head_dim)
    q_balance = balance.repeat_interleave(q.shape[1] // k.shape[1], 1)[:, :, None]

    mean_amax = mean.abs().amax((-2, -1), keepdim=True)
    balanced_mean = (mean.abs() * q_balance).amax((-2, -1), keepdim=True)
    norm = _norm(deviation.abs().amax(-2, keepdim=True) * q_balance)
    norm = torch.maximum(norm, balanced_mean * SMALLEST_DEVIATION)
    scaled = deviation * (sign * q_balance * _to_codes(norm) * _float32(1 / _root(head_dim)))
    scaled = (scaled.double() @ rotation).float()
    q_codes, q_scales = quantise_blocks(_widen(scaled.flatten(2, 3)[:, :, :q_len], head_dim))
    mean_unit = mean_amax.clamp_min(SMALLEST_AMAX)
    mean_units = mean_unit * _to_codes(norm)
    q_factors = norm * _float32(1 / (NVFP4_MAX * RANGE)) * abs(_float32(scale * LOG2_E))
    largest = NVFP4_MAX * (2.0 + k_dim(head_dim) ** 0.5 * balanced_mean / norm)
    limits = _float32(LARGEST_EXPONENT / NVFP4_MAX) / largest

    k_norm = _norm(k.abs().amax(2, keepdim=True) / balance)
    v, v_mean, v_amax = smooth(v, live)
    missing = -kv_len % (2 * BLOCK_KEYS)
    k_scaled = k * (1.0 / balance * _to_codes(k_norm) * _float32(1 / _root(head_dim)))
    k_scaled = F.pad((k_scaled.double() @ rotation).float(), (0, 0, 0, missing))
    v_scaled = F.pad(v * _to_codes(v_amax), (0, 0, 0, missing))
    k_codes, k_scales = quantise_blocks(_widen(k_scaled, head_dim))
    v_codes, v_scales = quantise_blocks(v_scaled.mT.contiguous())

    delta = None
    if smooth_q:
        means = (sign * mean / mean_unit).half().double().squeeze(3)
        keys = F.pad((k / k_size).half().double(), (0, 0, 0, missing))
        group = q.shape[1] // k.shape[1]
        delta = (means @ keys.repeat_interleave(group, 1).mT).float()
        k_units = (k_size / k_norm * NVFP4_MAX).repeat_interleave(group, 1)
        delta = delta * mean_units.squeeze(-1) * k_units
    kv = KvCodes(
        *(x.unflatten(2, (-1, BLOCK_KEYS)) for x in (k_codes, k_scales)),
        *in_blocks(v_codes, v_scales),
    )
    sizes = torch.cat([k_norm, v_amax], -1).squeeze(2)
    operands = Operands(
        q=dequantise_blocks(q_codes, q_scales),
        q_factors=torch.cat([q_factors, limits], -1).squeeze(3),
        k=dequantise_blocks(k_codes, k_scales),
        v=dequantise_blocks(v_codes, v_scales),
        kv_scales=sizes * _float32(1 / (NVFP4_MAX * RANGE)),
        v_means=v_mean.squeeze(2) / RANGE,
        delta=delta,
        q_block_tokens=q_block_tokens,
        kv_len=kv_len,
    )
    return Codes(q_codes, q_scales, kv), operands


def in_blocks(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """V's codes [B, Hk, D, keys] and scales [B, Hk, D, keys / 16] by blocks of keys."""
    return (
        codes.unflatten(-1, (-1, BLOCK_KEYS)).movedim(-2, 2),
        scales.unflatten(-1, (-1, BLOCK_KEYS // NVFP4_BLOCK)).movedim(-2, 2),
    )


def smooth(x: torch.Tensor, live: torch.Tensor | None):
    """(x less its token mean, the mean, the largest |x less it|); what is not live becomes zero."""
    live = torch.ones_like(x[..., :1], dtype=torch.bool) if live is None else live[..., None]
    x = x.masked_fill(~live, 0.0)
    count = live.sum(2, keepdim=True).clamp_min(1)
    mean = (x.double().sum(2, keepdim=True) / count).float()
    x = (x - mean).masked_fill(~live, 0.0)
    return x, mean, x.abs().amax((2, 3), keepdim=True).clamp_min(SMALLEST_AMAX)


def _balance(q, k, live: torch.Tensor | None) -> torch.Tensor:
    """Factors of Q's channels [B, Hk, 1, D], from q [B, Hq, Nq, D] and k [B, Hk, Nk, D]."""
    all_live = torch.ones(1, 1, 1, dtype=torch.bool, device=q.device)
    live = (all_live if live is None else live).expand(k.shape[:3])
    q_deviation = sampled_deviation(q, all_live.expand(q.shape[:3])).unflatten(1, (k.shape[1], -1))
    k_deviation = sampled_deviation(k, live)[:, :, None]
    return balance_of(q_deviation, k_deviation).squeeze(2)


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Of ``x`` [..., D], none negative, as norm_over_block of fp4_balance.cuh: [..., 1]."""
    largest = x.amax(-1, keepdim=True).clamp_min(SMALLEST_NORM)
    share = (x / largest).double()
    norm = largest * share.square().sum(-1, keepdim=True).float().sqrt()
    return norm.clamp_min(SMALLEST_NORM)


def _root(head_dim: int) -> float:
    return (head_dim & -head_dim) ** 0.5


def _to_codes(amax: torch.Tensor) -> torch.Tensor:
    # Not "NVFP4_MAX / amax": torch would multiply by a reciprocal, which rounds once more.
    return torch.full_like(amax, NVFP4_MAX) / amax


def _widen(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    return F.pad(x, (0, k_dim(head_dim) - head_dim))


# -------------------------------------------------------------------------------------- attention
def attend(
    operands: Operands, *, causal: bool, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O [B, Hq, Nq, D], log-sum-exp of the scores of smoothed K [B, Hq, Nq]), FP64.

    mask: bool (True = attend) or additive, broadcastable to [B, Hq, Nq, Nk].
    """
    q, group = operands.q.double(), operands.q.shape[1] // operands.k.shape[1]
    k = operands.k.double().repeat_interleave(group, 1)
    v = operands.v.double().repeat_interleave(group, 1)
    kv_scales = operands.kv_scales.repeat_interleave(group, 1)
    reference = torch.full((*q.shape[:3], 1), -FLOAT_MAX, dtype=torch.double, device=q.device)
    out = torch.zeros(*q.shape[:3], v.shape[2], dtype=torch.double, device=q.device)
    total = torch.zeros_like(reference)
    for first in range(0, operands.kv_len, BLOCK_KEYS):
        keys = slice(first, first + BLOCK_KEYS)
        s = q @ k[:, :, keys].mT
        if operands.delta is not None:
            s = s + operands.per_row(operands.delta[..., keys])
        s, factor, magic = _f32(s), operands.factors(keys).double(), operands.magic
        if mask is not None:
            s, factor, magic = _biased(s, factor, first, operands.kv_len, mask), 1.0, 0.0
        s = _hide(s, first, operands.kv_len, causal)
        tops = _f32(s * factor).unflatten(-1, (-1, NVFP4_BLOCK)).amax(-1)
        highest = tops.amax(-1, keepdim=True)
        behind = _any_in_warp(highest > reference + REFERENCE_SLACK)
        moved = torch.where(behind, torch.maximum(reference, highest), reference)
        shrink = torch.exp2(reference - moved)
        out, total, reference = out * shrink, total * shrink, moved

        shift = _f32(_float32(LOG2_P_UNIT - LOG2_E2M1_MAX) - reference)
        scale = torch.exp2(_f32(tops + shift)).float().clamp_min(2.0**-9)
        scale = round_e4m3(scale).double()[..., None]
        shift = _f32(_f32(_float32(LOG2_P_UNIT) - reference)[..., None] - _f32(scale.log2()))
        shift = _f32(shift.expand(*tops.shape, NVFP4_BLOCK).flatten(-2) - magic * factor)
        x = torch.exp2(_f32((s + magic) * factor + shift)).unflatten(-1, (-1, NVFP4_BLOCK))
        p = (round_e2m1(x.float()).double() * scale).flatten(-2)
        out = out + p @ v[..., keys].mT
        total = total + p.sum(-1, keepdim=True)
    blind = total == 0
    safe = total.masked_fill(blind, 1.0)
    o = out / safe * kv_scales[..., None, 1:].double()
    o = o + operands.v_means.repeat_interleave(group, 1)[:, :, None].double()
    lse = (reference + (safe.log2() - LOG2_P_UNIT)) * math.log(2)
    lse = lse.masked_fill(blind, -torch.inf)
    return o.masked_fill(blind, 0.0), lse.squeeze(-1)


def _hide(s, first: int, kv_len: int, causal: bool):
    """Scores with keys past the end, and future ones, at -inf."""
    key = torch.arange(first, first + BLOCK_KEYS, device=s.device)
    hidden = key >= kv_len
    if causal:
        hidden = hidden | (key > torch.arange(s.shape[2], device=s.device)[:, None])
    return s.masked_fill(hidden, -torch.inf)


def _biased(s, factor, first: int, kv_len: int, mask: torch.Tensor):
    """Exponents of two, hidden or biased by a mask."""
    tile = mask.expand(*mask.shape[:-1], kv_len)[..., first : first + BLOCK_KEYS]
    missing = BLOCK_KEYS - tile.shape[-1]
    if mask.dtype == torch.bool:
        return _f32(s * factor).masked_fill(~F.pad(tile, (0, missing)), -torch.inf)
    bias = F.pad(tile.float(), (0, missing))
    exponent = (bias * _float32(LOG2_E)).clamp_min(-0.99 * FLOAT_MAX)
    return _f32(s * factor + torch.where(bias < -FLOAT_MAX, bias, exponent))


def _any_in_warp(x: torch.Tensor) -> torch.Tensor:
    """Bool [..., Nq, 1]: whether any of the 16 rows of the same warp is True."""
    rows = x.shape[-2]
    warps = F.pad(x, (0, 0, 0, -rows % WARP_ROWS)).unflatten(-2, (-1, WARP_ROWS))
    return warps.any(-2, keepdim=True).expand_as(warps).flatten(-3, -2)[..., :rows, :]


def _f32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to FP32, in FP64."""
    return x.float().double()


def _f16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to FP16, in FP32."""
    return x.half().float()


def _float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()
