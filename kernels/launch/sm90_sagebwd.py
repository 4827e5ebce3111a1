"""Attention with a backward pass in INT8, on wgmma, for compute capability 9.0.

Source: SageBwd (arXiv 2505.11594, section 4) for which products are quantised and that dO V^T is
not. Other than there, P^T dO stays in 16 bits too, K and Q stay rotated until the end, and dS has a
scale per row and 64 tokens. Forward is ``sm90_int8``; backward recomputes its scores from the same
codes, so that P is the forward pass's.

dQ has a kernel of its own, which reads dS as the kernel of dK and dV left it in memory, in chunks
of about 1 GiB: five products in all. No gradient is summed up by atomics, and the same call gives
the same bits, whatever its chunks.

Forward and backward at B2 H24 S16384 took 34.2 ms on an H200 with 128 channels and 26.1 with 64,
FlashAttention-2 70.7 and 38.7, cuDNN 37.0 and 23.6. torch takes cuDNN there by itself, which is
faster for all but long sequences of 128 channels without a causal mask: so dispatch takes these
kernels there alone. docs/kernel-notes-sagebwd.md has what binds and what was tried.
"""

from typing import NamedTuple

import torch

from ..backend import (
    Backend,
    Capability,
    Dtypes,
    HeadDimIn,
    NotCausal,
    OneDtype,
    TokensFrom,
    Unmasked,
    token_major_like,
)
from ..differentiable import Call, differentiable
from ..jit.loader import launch
from ..jit.variants import Variant
from . import sm90_int8
from .geometry import one_each, parts, place
from .operands import DTYPES, OUTPUT, TENSOR, view
from .sagebwd import AHEAD_FROM, TRAINED_DTYPES, Operands, Passes, untraced

TILE_TOKENS = 64
HEAD_DIMS = (64, 128)

_PREPARING_THREADS = 256

# Bytes of dS in memory at a time: what two launches, of some milliseconds, are worth starting for.
LIMIT = 1 << 30
_DS_BYTES = TILE_TOKENS * TILE_TOKENS + 2 * TILE_TOKENS  # of ``DsTile``: codes, weights of keys

_KEY_CONSUMERS, _QUERY_CONSUMERS = 2, 3  # warpgroups of 64 rows; one more brings the tiles
_KEY_STAGES, _QUERY_STAGES = {64: 6, 128: 5}, {64: 8, 128: 7}  # tiles in shared memory
_ON_HOPPER = {"first_sm": 90, "last_sm": 90, "ahead_from": AHEAD_FROM}


def _query_tile_bytes(head_dim: int) -> int:
    """Bytes of ``QueryTile``: codes twice, dO, four facts of each query."""
    return TILE_TOKENS * (4 * head_dim + 16)


def _key_tile_bytes(head_dim: int) -> int:
    """Bytes of ``KeyTile``: codes, V, codes as numbers, four scales."""
    return TILE_TOKENS * 5 * head_dim + 16


def _ring_bytes(stages: int, tile_bytes: int) -> int:
    """Tiles with two barriers each."""
    return stages * (parts(tile_bytes, 1024) * 1024 + 16)


def _prepare(head_dim: int, dtype: torch.dtype) -> Variant:
    return Variant(
        source="sm90_sagebwd_prepare.cu",
        kernel="sm90_sagebwd_prepare",
        template=(head_dim, DTYPES[dtype]),
        params=f"{TENSOR * 3}7Q7i",
        threads=_PREPARING_THREADS,
        **_ON_HOPPER,
    )


def _key_gradients(head_dim: int, dtype: torch.dtype) -> Variant:
    own = _KEY_CONSUMERS * TILE_TOKENS * 3 * head_dim + 8  # codes and V of its keys; a barrier
    stages = _KEY_STAGES[head_dim]
    return Variant(
        source="sm90_sagebwd_key_gradients.cu",
        kernel="sm90_sagebwd_key_gradients",
        template=(head_dim, DTYPES[dtype], _KEY_CONSUMERS, stages),
        params=f"3Q{OUTPUT * 2}10i",
        threads=128 * (1 + _KEY_CONSUMERS),
        shared_bytes=own + _ring_bytes(stages, _query_tile_bytes(head_dim)),
        **_ON_HOPPER,
    )


def _query_gradient(head_dim: int, dtype: torch.dtype) -> Variant:
    stages = _QUERY_STAGES[head_dim]
    return Variant(
        source="sm90_sagebwd_query_gradient.cu",
        kernel="sm90_sagebwd_query_gradient",
        template=(head_dim, DTYPES[dtype], _QUERY_CONSUMERS, stages),
        params=f"4Q{OUTPUT}f10i",
        threads=128 * (1 + _QUERY_CONSUMERS),
        shared_bytes=_ring_bytes(stages, TILE_TOKENS * 2 * head_dim + _QUERY_CONSUMERS * _DS_BYTES),
        **_ON_HOPPER,
    )


_KINDS = [(d, t) for d in HEAD_DIMS for t in TRAINED_DTYPES]
_PREPARE = {kind: _prepare(*kind) for kind in _KINDS}
_KEY_GRADIENTS = {kind: _key_gradients(*kind) for kind in _KINDS}
_QUERY_GRADIENT = {kind: _query_gradient(*kind) for kind in _KINDS}
VARIANTS = (*_PREPARE.values(), *_KEY_GRADIENTS.values(), *_QUERY_GRADIENT.values())


class Chunk(NamedTuple):
    """Keys that dS is in memory of at a time: of ``heads`` key heads ``tiles`` tiles each."""

    first_head: int  # of the key heads of all batches
    heads: int
    first_tile: int
    tiles: int  # an even number, as that of all tiles is


def _chunks(kv_rows: int, tiles: int, tile_bytes: int, device: int) -> list[Chunk]:
    """All ``tiles`` of ``kv_rows`` key heads, in chunks of about LIMIT bytes.

    tile_bytes: dS of one tile of keys. Where not even one head fits, a chunk is as many keys of it
    as fit, but no fewer than keep all multiprocessors busy.
    """
    if fitting := LIMIT // (tiles * tile_bytes):
        heads = parts(kv_rows, parts(kv_rows, fitting))
        return [
            Chunk(first, min(heads, kv_rows - first), 0, tiles)
            for first in range(0, kv_rows, heads)
        ]
    least = one_each(tiles // _KEY_CONSUMERS, device) * _KEY_CONSUMERS
    ranges = parts(tiles, max(LIMIT // tile_bytes, least))
    step = parts(tiles, ranges * _KEY_CONSUMERS) * _KEY_CONSUMERS
    return [
        Chunk(head, 1, first, min(step, tiles - first))
        for head in range(kv_rows)
        for first in range(0, tiles, step)
    ]


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
    """Enqueue the kernels: dQ, dK and dV of ``operands``, token-major."""
    q, k, v, _, packed = operands
    layout = packed.layout
    batch, q_heads, q_len = layout.query_sizes
    _, kv_heads, _, _, _, blocks = layout.attention_sizes
    head_dim, device = layout.head_dim, q.get_device()
    kv_rows, group, query_tiles = batch * kv_heads, q_heads // kv_heads, parts(q_len, TILE_TOKENS)
    tile_bytes = group * query_tiles * _DS_BYTES
    chunks = _chunks(kv_rows, blocks, tile_bytes, device)
    largest = chunks[0]
    offsets = place(
        {
            "query_tiles": kv_rows * group * query_tiles * _query_tile_bytes(head_dim),
            "key_tiles": kv_rows * blocks * _key_tile_bytes(head_dim),
            "ds": largest.heads * largest.tiles * tile_bytes,
            "sums": (largest.tiles < blocks) * group * query_tiles * TILE_TOKENS * head_dim * 4,
        }
    )
    buffer = torch.empty(offsets["bytes"], dtype=torch.uint8, device=q.device)
    names = ("query_tiles", "key_tiles", "ds")
    tiles_and_ds = [buffer.data_ptr() + offsets[name] for name in names]
    start = packed.buffer.data_ptr()
    kind = head_dim, q.dtype
    launch(
        _PREPARE[kind],
        device,
        kv_rows * blocks + kv_rows * group * query_tiles,
        *view(d_out),
        *view(out),
        *view(v),
        start + layout.q_codes,
        start + layout.q_scales,
        lse.data_ptr(),
        start + layout.k_codes,
        start + layout.k_scales,
        *tiles_and_ds[:2],
        batch,
        *layout.attention_sizes,
    )
    d_q, d_k, d_v = (token_major_like(x) for x in (q, k, v))
    for first_head, heads, first_tile, tiles in chunks:
        sizes = *layout.attention_sizes, call.causal, first_head, first_tile, tiles
        launch(
            _KEY_GRADIENTS[kind],
            device,
            heads * tiles // _KEY_CONSUMERS,
            *tiles_and_ds,
            *view(d_k),
            *view(d_v),
            *sizes,
        )
        launch(
            _QUERY_GRADIENT[kind],
            device,
            heads * group * parts(query_tiles, _QUERY_CONSUMERS),
            *tiles_and_ds,
            buffer.data_ptr() + offsets["sums"],
            *view(d_q),
            call.scale,
            *sizes,
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
    # Elsewhere cuDNN, which torch takes, measured faster: benchmarks/results/training_h200.json.
    unasked=(HeadDimIn(((97, 128),)), NotCausal(), TokensFrom(16384)),
)
