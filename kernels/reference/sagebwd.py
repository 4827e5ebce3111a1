"""SageBwd: attention whose forward and backward run in INT8 (SageAttention3 paper, section 4).

Of the seven matrix products six are quantised: Q K^T and P V forward; Q K^T again, P^T dO, dS K and
dS^T Q backward. dO V^T stays in the inputs' own 16 bits: its error does not average out but adds up
in dS along the sequence (section 4.2).
"""

from dataclasses import dataclass

import torch

from ..differentiable import Call, differentiable
from .formats import quantise_8bit
from .forward import forward_in_slices, matmul_grouped, tile_scores
from .operands import Operands, prepare
from .scheme import Scheme
from .tiles import row_tiles, slices
from .visibility import Visibility

# The forward pass as published (algorithm 2): one scale per block of Q, K and V, P in 0..127.
PUBLISHED_FORWARD = Scheme(qk="int8", pv="int8", v_scale="block", smooth_q=False)
# The same products with P in 0..255, a smoothed V scaled per channel, blocks of 64 queries. O is
# closer to the truth, and so is D = rowsum(dO * O), whose error limits dQ and dK
# (docs/numerics.md).
TRAINING_FORWARD = Scheme(qk="int8", pv="uint8", smooth_q=False, smooth_v=True, block_q=64)


@dataclass(frozen=True)
class SageBwdOptions:
    """SageBwd, and its ablations.

    forward: the forward pass; its block_q and block_k are also the tokens that share a scale in
        the backward pass.
    gemm: "int8", or "e4m3" for FP8 in the backward's quantised products (tables 6 and 7).
    quantise_dov: quantise dO V^T too (table 1(c)).
    """

    forward: Scheme = TRAINING_FORWARD
    gemm: str = "int8"
    quantise_dov: bool = False

    def __post_init__(self):
        if self.gemm not in ("int8", "e4m3"):
            raise ValueError(f"gemm={self.gemm!r}: choose int8 or e4m3")
        if self.forward.smooth_q or self.forward.rotate:
            raise ValueError("SageBwd multiplies dS by Q and K: they cannot be centred or rotated")


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
    gradient (it gets none), RuntimeError in a backward pass with create_graph.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return differentiable(_Passes(options), q, k, v, mask=mask, scale=scale, causal=causal)


@dataclass(frozen=True)
class _Passes:
    options: SageBwdOptions

    def forward(self, q, k, v, mask, call: Call):
        return forward_in_slices(q, k, v, mask, call.scale, call.causal, self.options.forward)

    def backward(self, d_out, q, k, v, mask, out, lse, call: Call):
        scheme = self.options.forward
        d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        for part in slices(q, k, scheme.block_q, scheme.block_k):
            visibility = part.visibility(q, k, mask, call.causal)
            q_part, k_part, v_part = part.of_queries(q), part.of_keys(k), part.of_keys(v)
            operands = prepare(q_part, k_part, v_part, visibility, scheme, call.scale)
            grads = _gradients(
                operands,
                _without_unseen(v_part.float(), visibility),
                part.of_queries(out).float(),
                part.of_queries(lse),
                part.of_queries(d_out).float(),
                visibility,
                self.options,
            )
            part.of_queries(d_q).copy_(grads[0] * call.scale)
            part.of_keys(d_k).copy_(grads[1])
            part.of_keys(d_v).copy_(grads[2])
        return d_q, d_k, d_v


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
    block_q, block_k = options.forward.block_q, options.forward.block_k
    d_q = torch.zeros_like(operands.q)
    d_k, d_v = torch.zeros_like(operands.k), torch.zeros_like(v)
    delta = (d_out * out).sum(-1, keepdim=True)  # D of the paper
    # A row that sees nothing has the log-sum-exp -inf; +inf makes its P zero instead of NaN.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]
    for start, end, blocks in row_tiles(operands.q, block_q, block_k):
        q_tile, do_tile = operands.q[..., start:end, :], d_out[..., start:end, :]
        do_quantised = _quantise_tiles(do_tile, blocks, options)
        for col in range(0, visibility.last_key(end), block_k):
            cols = slice(col, min(col + block_k, visibility.nk))
            s = tile_scores(operands, start, end, blocks, cols.start, cols.stop)
            s = visibility.hide(s, start, col)
            p = torch.exp(s - lse[..., start:end, :])
            if options.quantise_dov:
                d_p = matmul_grouped(do_quantised, _quantise_tiles(v[..., cols, :], 1, options).mT)
            else:
                d_p = matmul_grouped(do_tile, v[..., cols, :].mT)
            d_s = _quantise_tiles(p * (d_p - delta[..., start:end, :]), blocks, options)
            p = _quantise_tiles(p, blocks, options)
            d_v[..., cols, :] += p.flatten(2, 3).mT @ do_quantised.flatten(2, 3)
            d_k[..., cols, :] += d_s.flatten(2, 3).mT @ q_tile.flatten(2, 3)
            d_q[..., start:end, :] += matmul_grouped(d_s, operands.k[..., cols, :])
    return d_q, d_k, d_v


def _without_unseen(v: torch.Tensor, visibility: Visibility) -> torch.Tensor:
    live = visibility.live_keys(v.device)
    return v if live is None else v.masked_fill(~live.squeeze(2), 0.0)


def _quantise_tiles(x: torch.Tensor, blocks: int, options: SageBwdOptions) -> torch.Tensor:
    """``x`` [..., rows, columns] with one scale for each of ``blocks`` equal blocks of rows."""
    tiles = x.unflatten(-2, (blocks, -1))
    amax = tiles.abs().amax((-2, -1), keepdim=True)
    values, scale = quantise_8bit(tiles, amax, options.gemm)
    return values.mul_(scale).flatten(-3, -2)
