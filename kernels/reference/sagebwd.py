"""SageBwd: attention whose forward and backward run in INT8 (SageAttention3 paper, section 4).

Of the seven matrix products six are quantised: Q K^T and P V forward; Q K^T again, P^T dO, dS K and
dS^T Q backward. dO V^T stays in the inputs' own 16 bits: its error does not average out but adds up
in dS along the sequence (section 4.2).
"""

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from .formats import E4M3_MAX, INT8_MAX, nonzero_scale, round_e4m3, round_int8
from .forward import attend, in_range_of, matmul_grouped, tile_scores
from .operands import Operands, prepare
from .scheme import Scheme
from .tiles import row_tiles, slices
from .visibility import Visibility


@dataclass(frozen=True)
class SageBwdOptions:
    """SageBwd as published, and its ablations.

    gemm: "int8", or "e4m3" for FP8 in the backward's quantised products (tables 6 and 7).
    quantise_dov: quantise dO V^T too (table 1(c)).
    smooth_k: subtract K's token mean before quantising; False feeds raw K to Q K^T and dS K.
    block_q, block_k: tokens that share a scale.
    """

    gemm: str = "int8"
    quantise_dov: bool = False
    smooth_k: bool = True
    block_q: int = 128
    block_k: int = 64

    def __post_init__(self):
        if self.gemm not in ("int8", "e4m3"):
            raise ValueError(f"gemm={self.gemm!r}: choose int8 or e4m3")

    @property
    def scheme(self) -> Scheme:
        """The forward pass (algorithm 2): INT8 per block, P per row."""
        return Scheme(
            qk="int8",
            pv="int8",
            smooth_q=False,
            smooth_k=self.smooth_k,
            v_scale="block",
            block_q=self.block_q,
            block_k=self.block_k,
        )


def sagebwd_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    options: SageBwdOptions = SageBwdOptions(),
) -> torch.Tensor:
    """Attention for training: arguments and result as in ``reference_attention``.

    Gradients reach q, k and v in their own dtypes. dO V^T uses dO and V as they are: 16 bits where
    the inputs have 16 bits, FP32 where they have more. Raises ValueError if the mask requires a
    gradient (it gets none) and RuntimeError on a second derivative.
    """
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("SageBwd gives no gradient to the mask: pass mask.detach()")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _SageBwd.apply(q, k, v, mask, scale, causal, options)


class _SageBwd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, scale, causal, options):
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        scheme = options.scheme
        with torch.autocast(q.device.type, enabled=False):
            for part in slices(q, k, scheme.block_q, scheme.block_k):
                visibility = part.visibility(q, k, mask, causal)
                operands = prepare(
                    part.of_queries(q), part.of_keys(k), part.of_keys(v), visibility, scheme, scale
                )
                o, row_lse = attend(operands, visibility, scheme)
                part.of_queries(out).copy_(in_range_of(q.dtype, o))
                part.of_queries(lse).copy_(row_lse)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.scale, ctx.causal, ctx.options = scale, causal, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, mask, out, lse = ctx.saved_tensors
        options, scheme = ctx.options, ctx.options.scheme
        d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            for part in slices(q, k, scheme.block_q, scheme.block_k):
                visibility = part.visibility(q, k, mask, ctx.causal)
                v_part = part.of_keys(v)
                operands = prepare(
                    part.of_queries(q), part.of_keys(k), v_part, visibility, scheme, ctx.scale
                )
                grads = _gradients(
                    operands,
                    v_part.float(),
                    part.of_queries(out).float(),
                    part.of_queries(lse),
                    part.of_queries(d_out).float(),
                    visibility,
                    options,
                )
                part.of_queries(d_q).copy_(grads[0] * ctx.scale)
                part.of_keys(d_k).copy_(grads[1])
                part.of_keys(d_v).copy_(grads[2])
        return d_q, d_k, d_v, None, None, None, None


def _gradients(
    operands: Operands,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    visibility: Visibility,
    options: SageBwdOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Algorithm 3 for one slice: dQ / scale [B, Hk, G, Nq, D], dK and dV [B, Hk, Nk, D], FP32.

    operands.q carries the softmax scale, so dS^T Q needs none, and dS K still does.
    """
    d_q = torch.zeros_like(operands.q)
    d_k, d_v = torch.zeros_like(operands.k), torch.zeros_like(v)
    delta = (d_out * out).sum(-1, keepdim=True)  # D of the paper
    # A row that sees nothing has the log-sum-exp -inf; +inf makes its P zero instead of NaN.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]
    for start, end, blocks in row_tiles(operands.q, options.block_q, options.block_k):
        q_tile, do_tile = operands.q[..., start:end, :], d_out[..., start:end, :]
        do_quantised = _quantise_tiles(do_tile, blocks, options)
        do_for_v = do_quantised if options.quantise_dov else do_tile
        for col in range(0, visibility.last_key(end), options.block_k):
            cols = slice(col, min(col + options.block_k, visibility.nk))
            s = tile_scores(operands, start, end, blocks, cols.start, cols.stop)
            s = visibility.hide(s, start, col)
            p = torch.exp(s - lse[..., start:end, :])
            v_tile = operands.v[..., cols, :] if options.quantise_dov else v[..., cols, :]
            d_p = matmul_grouped(do_for_v, v_tile.mT)
            d_s = p * (d_p - delta[..., start:end, :])
            d_s = _quantise_tiles(d_s, blocks, options)
            p = _quantise_tiles(p, blocks, options)
            d_v[..., cols, :] += p.flatten(2, 3).mT @ do_quantised.flatten(2, 3)
            d_k[..., cols, :] += d_s.flatten(2, 3).mT @ q_tile.flatten(2, 3)
            d_q[..., start:end, :] += matmul_grouped(d_s, operands.k[..., cols, :])
    return d_q, d_k, d_v


def _quantise_tiles(x: torch.Tensor, blocks: int, options: SageBwdOptions) -> torch.Tensor:
    """``x`` [..., rows, columns] with one scale for each of ``blocks`` equal blocks of rows."""
    tiles = x.unflatten(-2, (blocks, -1))
    amax = tiles.abs().amax((-2, -1), keepdim=True)
    if options.gemm == "int8":
        scale = nonzero_scale(amax / INT8_MAX)
        return round_int8(tiles, scale).mul_(scale).flatten(-3, -2)
    scale = nonzero_scale(amax / E4M3_MAX)
    return round_e4m3(tiles / scale).mul_(scale).flatten(-3, -2)
