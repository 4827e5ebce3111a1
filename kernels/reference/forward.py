"""Quantised attention with an online softmax over tiles: one function for every scheme."""

import math

import torch

from ..backend import token_major_like
from .formats import (
    E2M1_MAX,
    E4M3_MAX,
    INT8_MAX,
    MXFP4_BLOCK,
    UINT8_MAX,
    nonzero_scale,
    nvfp4_blocks,
    pad_to_multiple,
    quantise_mxfp4,
    round_e4m3,
)
from .operands import Operands, prepare
from .scheme import Scheme
from .tiles import row_tiles, slices
from .visibility import Visibility


@torch.no_grad()
def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scheme: Scheme,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention quantised as ``scheme`` says, on CPU or CUDA; no gradient (see sagebwd_attention).

    q: [B, Hq, Nq, D]; k, v: [B, Hk, Nk, D], Hq a multiple of Hk; fp16, bf16, fp32 or fp64 (computed
    in FP32), any strides, D up to 256. mask: bool (True = attend) or additive, broadcastable to
    [B, Hq, Nq, Nk]; a row that sees nothing gives zeros. scale: D ** -0.5 if None. causal: query i
    sees key j where j <= i, top-left aligned as in torch's scaled_dot_product_attention.

    Returns [B, Hq, Nq, D] in q's dtype; with return_lse also the logarithm of the sum of each row's
    exponentiated scores, FP32 [B, Hq, Nq]. NaN and infinite inputs reach the same outputs as in
    plain attention.

    Sources: SageAttention3 (arXiv 2505.11594), algorithm 1 and sections 3.1, 3.2; SageAttention2
    (arXiv 2411.10958) for smoothing; FlashAttention for the tiles.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = forward_in_slices(q, k, v, mask, scale, causal, scheme, true_lse=return_lse)
    return (out, lse) if return_lse else out


def forward_in_slices(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    scheme: Scheme,
    *,
    true_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp [B, Hq, Nq], of the scores of smoothed K unless ``true_lse``."""
    out = token_major_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        for part in slices(q, k, scheme.block_q, scheme.block_k):
            visibility = part.visibility(q, k, mask, causal)
            q_part = part.of_queries(q)
            operands = prepare(q_part, part.of_keys(k), part.of_keys(v), visibility, scheme, scale)
            o, row_lse = attend(operands, visibility, scheme)
            part.of_queries(out).copy_(in_range_of(q.dtype, o))
            if true_lse:
                row_lse += operands.smoothed_away(q_part) * scale
            part.of_queries(lse).copy_(row_lse)
    return out, lse


def attend(
    operands: Operands, visibility: Visibility, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """O [B, Hk, G, Nq, D] and the log-sum-exp [B, Hk, G, Nq] of the scores of smoothed K, FP32."""
    q, v = operands.q, operands.v
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1])
    p_max = level_one_scale(scheme)
    for start, end, blocks in row_tiles(q, scheme.block_q, scheme.block_k):
        highest = q.new_full((*q.shape[:-2], end - start, 1), -torch.inf)
        total = torch.zeros_like(highest)
        acc = torch.zeros_like(out[..., start:end, :])
        for col in range(0, visibility.last_key(end), scheme.block_k):
            col_end = min(col + scheme.block_k, visibility.nk)
            s = tile_scores(operands, start, end, blocks, col, col_end)
            s = visibility.hide(s, start, col)
            new_highest = torch.maximum(highest, s.amax(-1, keepdim=True))
            # A row that has seen no key yet keeps -inf; shifting by it would give NaN.
            shift = new_highest.masked_fill(new_highest == -torch.inf, 0.0)
            shrink = torch.exp(highest - shift)
            p = torch.exp_(s.sub_(shift - math.log(p_max)))
            p_quantised = quantise_p(p, scheme)
            total = total * shrink + (p_quantised if scheme.quantised_row_sum else p).sum(
                -1, keepdim=True
            )
            acc = acc.mul_(shrink).add_(_times_values(p_quantised, operands, p, col, col_end))
            highest = new_highest
        sees_nothing = total == 0
        o = acc / total.masked_fill(sees_nothing, 1.0)
        if operands.v_scale is not None:
            o.mul_(operands.v_scale[:, :, None])
        if operands.v_mean is not None:
            o.add_(operands.v_mean[:, :, None])
        out[..., start:end, :] = o.masked_fill_(sees_nothing, 0.0)
        lse[..., start:end] = (highest + torch.log(total / p_max)).squeeze(-1)
    return out, lse


def tile_scores(
    operands: Operands, start: int, end: int, blocks: int, col: int, col_end: int
) -> torch.Tensor:
    """Scores [B, Hk, G, rows, columns] of one tile: query rows of ``blocks`` equal blocks."""
    s = matmul_grouped(operands.q[..., start:end, :], operands.k[..., col:col_end, :].mT)
    if operands.q_mean is not None:
        first = start // operands.block_q
        q_mean = operands.q_mean[..., first : first + blocks, :]
        smooth_k = operands.smooth_k[..., col:col_end, :]
        correction = matmul_grouped(q_mean.double(), smooth_k.double().mT).float()  # never in TF32
        s.unflatten(-2, (blocks, -1)).add_(correction[..., None, :])
    aside = operands.nonfinite
    if aside is not None:
        affected = aside.q_rows[..., start:end, None] | aside.k_rows[:, :, None, None, col:col_end]
        exact = matmul_grouped(aside.q[..., start:end, :], aside.k[..., col:col_end, :].mT)
        s = torch.where(affected, exact, s)
    return s


def level_one_scale(scheme: Scheme) -> float:
    """The value that P's row maximum has before quantisation (section 3.2, level 1)."""
    two_level = scheme.pv == "nvfp4" and scheme.p_scaling == "two_level"
    return E4M3_MAX * E2M1_MAX if two_level else 1.0


def quantise_p(p: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """P [..., rows, columns] of one tile, non-negative, as the product with V sees it."""
    if scheme.pv == "exact":
        return p
    if scheme.pv == "e4m3":
        return round_e4m3(p * E4M3_MAX).div_(E4M3_MAX)
    if scheme.pv in ("uint8", "int8"):
        levels = UINT8_MAX if scheme.pv == "uint8" else INT8_MAX
        scale = nonzero_scale(p.amax(-1, keepdim=True) / levels)
        return (p / scale).round_().mul_(scale)
    columns = p.shape[-1]
    p = pad_to_multiple(p, MXFP4_BLOCK)
    blocks = nvfp4_blocks(p) if scheme.pv == "nvfp4" else quantise_mxfp4(p)
    return blocks.without_tensor_scale()[..., :columns]


def in_range_of(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """``x`` in ``dtype``; quantisation error alone never turns a finite value infinite."""
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(x.dtype).max:
        return x.to(dtype)
    return torch.where(x.isinf(), x, x.clamp(-limit, limit)).to(dtype)


def _times_values(
    p_quantised: torch.Tensor, operands: Operands, p: torch.Tensor, col: int, col_end: int
) -> torch.Tensor:
    o = matmul_grouped(p_quantised, operands.v[..., col:col_end, :])
    if operands.nonfinite is not None:
        o = o + matmul_grouped(p, operands.nonfinite.v[..., col:col_end, :])
    return o


def matmul_grouped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[B, Hk, G, M, K] @ [B, Hk, K, N]: the query heads of a group share one right-hand side."""
    group = x.shape[2]
    return (x.flatten(2, 3) @ y).unflatten(2, (group, -1))
