"""Attention with a backward pass in INT8, on mma.sync, for compute capabilities 8.0 to 12.x.

Source: SageBwd (arXiv 2505.11594, section 4) for which products are quantised and that dO V^T is
not. Forward is ``sm80_int8``; backward recomputes its scores from the same codes, so that P is the
forward pass's. What is done otherwise than in the paper, docs/numerics.md has with figures: K and Q
stay rotated until the end, and whatever is summed over tokens has a scale per row and 32 tokens.

No backend offers it yet. On an H200 its gradients are as they should be (cosine .9998 and more
against FP64 on normal tensors), but forward and backward take 1.7 times as long as
FlashAttention-2's.

dQ has a kernel of its own, which computes scores and dP a second time: two of seven products. In
exchange no gradient is summed up by atomics, and the same call gives the same bits.
"""

from typing import NamedTuple

import torch

from ..backend import token_major_like
from ..differentiable import Call, differentiable
from ..jit.loader import launch
from ..jit.variants import Variant
from . import sm80_int8
from .geometry import parts, place
from .operands import (
    DTYPES,
    MASK,
    OUTPUT,
    TENSOR,
    mask_view,
    view,
)
from .sagebwd import AHEAD_FROM, TRAINED_DTYPES, Operands, Passes, untraced

TILE_TOKENS = 32
HEAD_DIMS = (64, 96, 128)

_QUERY_BYTES = 16  # struct Query
_PREPARING_THREADS = 128


class Tile(NamedTuple):
    """Rows of a block of threads; they share each tile of 32 tokens of the other side."""

    warps: int  # of 16 rows each
    min_blocks: int  # resident per multiprocessor

    @property
    def rows(self) -> int:
        return 16 * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps


# By the compiler's register counts; none was timed.
_QUERY_TILES = {d: Tile(warps=8, min_blocks=1) for d in HEAD_DIMS}
_KEY_TILES = {d: Tile(warps=8, min_blocks=1) for d in HEAD_DIMS}


def _prepare(head_dim: int, dtype: torch.dtype) -> Variant:
    return Variant(
        source="sm80_sagebwd_prepare.cu",
        kernel="sm80_sagebwd_prepare",
        template=(head_dim, DTYPES[dtype]),
        params=f"{TENSOR * 2}8Q6i",
        threads=_PREPARING_THREADS,
        ahead_from=AHEAD_FROM,
    )


def _query_gradient(head_dim: int, dtype: torch.dtype, masked: bool) -> Variant:
    tile = _QUERY_TILES[head_dim]
    return Variant(
        source="sm80_sagebwd_query_gradient.cu",
        kernel="sm80_sagebwd_query_gradient",
        template=(head_dim, DTYPES[dtype], tile.warps, masked),
        params=f"5Q{TENSOR * 2}{MASK}{OUTPUT}f7i",
        threads=tile.threads,
        min_blocks=tile.min_blocks,
        shared_bytes=2 * 4 * TILE_TOKENS * head_dim,  # two stages of K twice and V
        ahead_from=AHEAD_FROM,
    )


def _key_gradients(head_dim: int, dtype: torch.dtype, masked: bool) -> Variant:
    tile = _KEY_TILES[head_dim]
    return Variant(
        source="sm80_sagebwd_key_gradients.cu",
        kernel="sm80_sagebwd_key_gradients",
        template=(head_dim, DTYPES[dtype], tile.warps, masked),
        params=f"6Q{TENSOR * 2}{MASK}{OUTPUT * 2}7i",
        threads=tile.threads,
        min_blocks=tile.min_blocks,
        # Two stages of Q twice, dO twice and what is known of each query; K and V of the block.
        shared_bytes=2 * TILE_TOKENS * (5 * head_dim + _QUERY_BYTES)
        + (tile.rows * 3 * head_dim if head_dim > 64 else 0),
        ahead_from=AHEAD_FROM,
    )


_KINDS = [(d, t, masked) for d in HEAD_DIMS for t in TRAINED_DTYPES for masked in (False, True)]
_PREPARE = {(d, t): _prepare(d, t) for d in HEAD_DIMS for t in TRAINED_DTYPES}
_QUERY_GRADIENT = {kind: _query_gradient(*kind) for kind in _KINDS}
_KEY_GRADIENTS = {kind: _key_gradients(*kind) for kind in _KINDS}
VARIANTS = (*_PREPARE.values(), *_QUERY_GRADIENT.values(), *_KEY_GRADIENTS.values())


@untraced
def train(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """``softmax(scale Q K^T + mask) V`` [B, Hq, Nq, D], differentiable in q, k and v.

    q: [B, Hq, Nq, D]; k, v: [B, Hk, Nk, D], all fp16 or all bf16, D up to 128. mask: None, bool
    (True = attend) or additive, [B|1, Hq|1, Nq|1, Nk|1]; it gets no gradient. Errors as in
    ``differentiable``. A row whose keys all have the lowest finite bias (then they are attended to
    evenly) gets and passes on no gradient.
    """
    return differentiable(_PASSES, q, k, v, mask=mask, scale=scale, causal=causal)


def _gradients(
    d_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, operands: Operands, call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Enqueue the three kernels: dQ, dK and dV of ``operands``, token-major."""
    q, k, v, mask, packed = operands
    layout = packed.layout
    batch, q_heads, q_len = layout.query_sizes
    _, kv_heads, _, kv_len, channels, blocks = layout.attention_sizes
    head_dim, device = layout.head_dim, q.get_device()
    panels = parts(q_len, TILE_TOKENS)
    token_bytes = batch * q_heads * panels * TILE_TOKENS * head_dim
    offsets = place(
        {
            "d_out": token_bytes,
            "q": token_bytes,
            "k": batch * kv_heads * 2 * blocks * TILE_TOKENS * head_dim,
            "queries": batch * q_heads * panels * TILE_TOKENS * _QUERY_BYTES,
        }
    )
    buffer = torch.empty(offsets["bytes"], dtype=torch.uint8, device=q.device)
    d_out_transposed, q_transposed, k_transposed, queries = (
        buffer.data_ptr() + offsets[name] for name in ("d_out", "q", "k", "queries")
    )
    start = packed.buffer.data_ptr()
    q_codes, k_codes = start + layout.q_codes, start + layout.k_codes
    k_scales = start + layout.k_scales
    launch(
        _PREPARE[head_dim, q.dtype],
        device,
        batch * (kv_heads * 2 * blocks + q_heads * panels),
        *view(d_out),
        *view(out),
        q_codes,
        start + layout.q_scales,
        lse.data_ptr(),
        k_codes,
        d_out_transposed,
        q_transposed,
        k_transposed,
        queries,
        batch,
        q_heads,
        kv_heads,
        q_len,
        channels,
        blocks,
    )
    d_q, d_k, d_v = (token_major_like(x) for x in (q, k, v))
    kind = head_dim, q.dtype, mask is not None
    launch(
        _QUERY_GRADIENT[kind],
        device,
        batch * q_heads * parts(q_len, _QUERY_TILES[head_dim].rows),
        q_codes,
        queries,
        k_codes,
        k_transposed,
        k_scales,
        *view(d_out),
        *view(v),
        *mask_view(mask),
        *view(d_q),
        call.scale,
        *layout.attention_sizes,
        call.causal,
    )
    launch(
        _KEY_GRADIENTS[kind],
        device,
        batch * kv_heads * parts(kv_len, _KEY_TILES[head_dim].rows),
        q_codes,
        q_transposed,
        d_out_transposed,
        queries,
        k_codes,
        k_scales,
        *view(d_out),
        *view(v),
        *mask_view(None if mask is None else mask.mT),
        *view(d_k),
        *view(d_v),
        *layout.attention_sizes,
        call.causal,
    )
    return d_q, d_k, d_v


_PASSES = Passes(sm80_int8.attend_smoothed, _gradients)
