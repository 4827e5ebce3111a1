"""Attention with a backward pass in INT8, on wgmma, for compute capability 9.0.

Source: SageBwd (arXiv 2505.11594, section 4) for which products are quantised and that dO V^T is
not. Other than there, P^T dO stays in 16 bits too, K and Q stay rotated until the end, and dS has a
scale per row and 64 tokens. Forward is ``sm90_int8``; backward recomputes its scores from the same
codes, so that P is the forward pass's.

dQ has a kernel of its own, which computes scores and dP a second time: two of seven products. In
exchange no gradient is summed up by atomics, and the same call gives the same bits.

Forward and backward at B2 H24 S16384 took 44.2 ms on an H200 with 128 channels and 30.8 with 64,
FlashAttention-2 71.5 and 38.8. But torch takes cuDNN there by itself, and that took 41.5 and 24.8:
so dispatch leaves training to the host. docs/kernel-notes-sagebwd.md has what binds and what was
tried.
"""

from typing import NamedTuple

import torch

from ..backend import (
    Backend,
    Capability,
    Dtypes,
    HeadDimIn,
    OneDtype,
    Unmasked,
    token_major_like,
)
from ..differentiable import Call, differentiable
from ..jit.loader import launch
from ..jit.variants import Variant
from . import sm90_int8
from .geometry import parts, place
from .operands import DTYPES, OUTPUT, TENSOR, view
from .sagebwd import AHEAD_FROM, TRAINED_DTYPES, Operands, Passes, untraced

TILE_TOKENS = 64
HEAD_DIMS = (64, 128)

_PREPARING_THREADS = 256


class Tile(NamedTuple):
    """What a block of threads works on, besides 64 tokens of the other side at a time."""

    consumers: int  # warpgroups of 64 rows; one more brings the tiles
    stages: int  # tiles in shared memory

    @property
    def rows(self) -> int:
        return self.consumers * TILE_TOKENS

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    def shared_bytes(self, head_dim: int, tile_bytes: int) -> int:
        """Tiles with two barriers each; codes and 16-bit values of the rows; their barrier."""
        tile_bytes = parts(tile_bytes, 1024) * 1024
        return self.stages * (tile_bytes + 16) + self.rows * 3 * head_dim + 8


_QUERY_TILES = {64: Tile(consumers=3, stages=6), 128: Tile(consumers=3, stages=4)}
_KEY_TILES = {64: Tile(consumers=2, stages=6), 128: Tile(consumers=2, stages=5)}
_ON_HOPPER = {"first_sm": 90, "last_sm": 90, "ahead_from": AHEAD_FROM}


def _query_tile_bytes(head_dim: int) -> int:
    """Bytes of ``QueryTile``: codes twice, dO, four facts and a row of each query."""
    return TILE_TOKENS * (4 * head_dim + 2 * 16)


def _key_tile_bytes(head_dim: int) -> int:
    """Bytes of ``KeyTile``: codes twice, V, four scales."""
    return TILE_TOKENS * 4 * head_dim + 16


def _prepare(head_dim: int, dtype: torch.dtype) -> Variant:
    return Variant(
        source="sm90_sagebwd_prepare.cu",
        kernel="sm90_sagebwd_prepare",
        template=(head_dim, DTYPES[dtype]),
        params=f"{TENSOR * 3}7Q7i",
        threads=_PREPARING_THREADS,
        **_ON_HOPPER,
    )


def _query_gradient(head_dim: int, dtype: torch.dtype, tile: Tile) -> Variant:
    return Variant(
        source="sm90_sagebwd_query_gradient.cu",
        kernel="sm90_sagebwd_query_gradient",
        template=(head_dim, DTYPES[dtype], *tile),
        params=f"2Q{OUTPUT}f7i",
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(head_dim, _key_tile_bytes(head_dim)),
        **_ON_HOPPER,
    )


def _key_gradients(head_dim: int, dtype: torch.dtype, tile: Tile) -> Variant:
    return Variant(
        source="sm90_sagebwd_key_gradients.cu",
        kernel="sm90_sagebwd_key_gradients",
        template=(head_dim, DTYPES[dtype], *tile),
        params=f"2Q{OUTPUT * 2}7i",
        threads=tile.threads,
        # Without what only dQ reads.
        shared_bytes=tile.shared_bytes(head_dim, _query_tile_bytes(head_dim) - TILE_TOKENS * 16),
        **_ON_HOPPER,
    )


_KINDS = [(d, t) for d in HEAD_DIMS for t in TRAINED_DTYPES]
_PREPARE = {kind: _prepare(*kind) for kind in _KINDS}
_QUERY_GRADIENT = {(d, t): _query_gradient(d, t, _QUERY_TILES[d]) for d, t in _KINDS}
_KEY_GRADIENTS = {(d, t): _key_gradients(d, t, _KEY_TILES[d]) for d, t in _KINDS}
VARIANTS = (*_PREPARE.values(), *_QUERY_GRADIENT.values(), *_KEY_GRADIENTS.values())


@untraced
def train(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: None = None,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """``softmax(scale Q K^T) V`` [B, Hq, Nq, D], differentiable in q, k and v.

    q: [B, Hq, Nq, D]; k, v: [B, Hk, Nk, D], all fp16 or all bf16, D up to 64 or 97 to 128.
    Errors as in ``differentiable``.
    """
    return differentiable(_PASSES, q, k, v, mask=mask, scale=scale, causal=causal)


def _gradients(
    d_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    operands: Operands,
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Enqueue the three kernels: dQ, dK and dV of ``operands``, token-major."""
    q, k, v, _, packed = operands
    layout = packed.layout
    batch, q_heads, q_len = layout.query_sizes
    _, kv_heads, _, kv_len, _, blocks = layout.attention_sizes
    head_dim, device = layout.head_dim, q.get_device()
    tiles = batch * q_heads * parts(q_len, TILE_TOKENS)
    offsets = place(
        {
            "query_tiles": tiles * _query_tile_bytes(head_dim),
            "key_tiles": batch * kv_heads * blocks * _key_tile_bytes(head_dim),
        }
    )
    buffer = torch.empty(offsets["bytes"], dtype=torch.uint8, device=q.device)
    both = tuple(buffer.data_ptr() + offsets[name] for name in ("query_tiles", "key_tiles"))
    start = packed.buffer.data_ptr()
    kind = head_dim, q.dtype
    launch(
        _PREPARE[kind],
        device,
        batch * kv_heads * blocks + tiles,
        *view(d_out),
        *view(out),
        *view(v),
        start + layout.q_codes,
        start + layout.q_scales,
        lse.data_ptr(),
        start + layout.k_codes,
        start + layout.k_scales,
        *both,
        batch,
        *layout.attention_sizes,
    )
    d_q, d_k, d_v = (token_major_like(x) for x in (q, k, v))
    launch(
        _QUERY_GRADIENT[kind],
        device,
        batch * q_heads * parts(q_len, _QUERY_TILES[head_dim].rows),
        *both,
        *view(d_q),
        call.scale,
        *layout.attention_sizes,
        call.causal,
    )
    launch(
        _KEY_GRADIENTS[kind],
        device,
        batch * kv_heads * parts(kv_len, _KEY_TILES[head_dim].rows),
        *both,
        *view(d_k),
        *view(d_v),
        *layout.attention_sizes,
        call.causal,
    )
    return d_q, d_k, d_v


_PASSES = Passes(sm90_int8.attend_smoothed, _gradients)


SM90_SAGEBWD = Backend(
    name="sm90_sagebwd",
    precisions=("int8",),
    native=True,
    constraints=(
        Capability((9, 0), (9, 0)),
        Dtypes(TRAINED_DTYPES),
        OneDtype(),
        HeadDimIn(((1, 64), (97, 128))),
        Unmasked(),
    ),
    forward=None,
    train=train,
    on_request=True,  # cuDNN is faster
)
