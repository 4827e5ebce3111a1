"""Q, K and V to NVFP4 in two launches, and a third for the scores that smoothing takes from Q.

Layouts: kernels/cuda/fp4_layout.cuh; scheme: docs/fp4.md.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from ..jit.loader import launch
from ..jit.variants import Variant
from .geometry import HEAD_DIMS, blocks_each, chunk, padded_head_dim, parts, place
from .operands import DTYPES, LIVE_KEYS, LOG2_E, TENSOR, live_view, view

BLOCK_KEYS = 64
TILE_BLOCKS = 2  # of keys, per step of the attention kernel
Q_BLOCKS = 2  # of queries, per block of threads of the attention kernel
DELTA_BYTES = BLOCK_KEYS // 2 * 16  # per block of queries and block of keys
VALUES = f"{TENSOR}{LIVE_KEYS}4Q7i"  # struct Values of fp4_values.cuh
NATIVE_SM = 120  # compute capability; below, FP4 is emulated and nothing of it built ahead

THREADS = 256
_DELTA_THREADS = 128
_DELTA_Q_BLOCKS = 64  # per block of threads


def quantiser(kernel: str, head_dim: int, dtype: torch.dtype, params: str, **promises) -> Variant:
    return Variant(
        source=f"{kernel}.cu",
        kernel=kernel,
        template=(head_dim, DTYPES[dtype]),
        params=params,
        ahead_from=NATIVE_SM,
        **promises,
    )


def _prologue(head_dim: int, dtype: torch.dtype) -> Variant:
    params = f"{TENSOR * 3}{LIVE_KEYS}2Q9i"
    blocks = 2 if head_dim * dtype.itemsize <= 512 else 1
    return quantiser(
        "sm80_fp4_prologue", head_dim, dtype, params, threads=THREADS, min_blocks=blocks
    )


def _pack(head_dim: int, dtype: torch.dtype) -> Variant:
    params = f"{TENSOR * 2}{VALUES}0Q9Q6if"
    blocks = 2 if dtype == torch.float32 else 3
    return quantiser("sm80_fp4_pack", head_dim, dtype, params, threads=THREADS, min_blocks=blocks)


def _delta(head_dim: int, dtype: torch.dtype) -> Variant:
    params = f"{TENSOR}{LIVE_KEYS}6Q11i"
    return quantiser("sm80_fp4_delta", head_dim, dtype, params, threads=_DELTA_THREADS)


_PROLOGUE = {(d, t): _prologue(d, t) for d in HEAD_DIMS for t in DTYPES}
_PACK = {(d, t): _pack(d, t) for d in HEAD_DIMS for t in DTYPES}
_DELTA = {(d, t): _delta(d, t) for d in HEAD_DIMS for t in DTYPES}
VARIANTS = (*_PROLOGUE.values(), *_PACK.values(), *_DELTA.values())


class Layout(NamedTuple):
    """How a call is cut up, and where its parts lie in one buffer: offsets in bytes."""

    head_dim: int  # one of HEAD_DIMS
    k_dim: int  # channels of Q and K as they are multiplied
    q_blocks: int  # per (batch, query head), each smoothed by its own mean
    q_block_tokens: int
    kv_blocks: int  # of BLOCK_KEYS keys per (batch, key head)
    kv_block_bytes: int
    chunks: int  # of keys, per (batch, key head) and per K and V, that statistics are made of
    chunk_tokens: int
    blocks_each: int  # blocks of keys, of K or of V, that a block of threads packs
    q_codes: int
    q_scales: int
    q_factors: int
    q_means: int
    q_mean_units: int
    kv: int
    kv_scales: int
    k_means: int
    k_sizes: int
    v_means: int
    k_deviations: int
    q_deviations: int
    partials: int
    bytes: int


class Packed(NamedTuple):
    """Q, K and V as the attention kernel reads them."""

    buffer: torch.Tensor  # uint8
    layout: Layout

    def part(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The part of that name as a tensor of ``shape``, a view."""
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        return self.buffer[getattr(self.layout, name) :][:size].view(dtype).view(shape)


def quantise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    live_keys: torch.Tensor | None,
    scale: float,
    q_block_tokens: int,
    smooth_q: bool,
) -> Packed:
    """Smooth all three, balance and rotate Q and K, quantise. Enqueues two kernels, never syncs.

    q [B, Hq, Nq, D], k, v [B, Hk, Nk, D] as ``readable`` gives them. live_keys: bool
    [B|1, Hk|1, Nk], contiguous in the last dimension: keys that some query sees; None: all.
    scale: of the softmax. q_block_tokens: queries that share a mean and an FP32 scale.
    """
    batch, q_heads, q_len, channels = q.shape
    _, kv_heads, kv_len, _ = k.shape
    device = q.device.index
    layout = lay_out(batch, q_heads, kv_heads, q_len, kv_len, channels, q_block_tokens, device)
    buffer = torch.empty(layout.bytes, dtype=torch.uint8, device=q.device)
    start = buffer.data_ptr()
    key = layout.head_dim, q.dtype
    reductions = batch * kv_heads * 2 * layout.chunks
    launch(
        _PROLOGUE[key],
        device,
        reductions + batch * (kv_heads + q_heads),
        *view(q),
        *view(k),
        *view(v),
        *live_view(live_keys),
        start + layout.partials,
        start + layout.k_deviations,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        channels,
        layout.chunks,
        layout.chunk_tokens,
        reductions,
        batch * kv_heads,
    )
    kv_launch = parts(layout.kv_blocks, layout.blocks_each) * 2 * kv_heads * batch
    launch(
        _PACK[key],
        device,
        kv_launch + batch * q_heads * layout.q_blocks,
        *view(q),
        *view(k),
        *values(v, live_keys, layout, start),
        start + layout.k_deviations,
        start + layout.q_deviations,
        start + layout.q_codes,
        start + layout.q_scales,
        start + layout.q_factors,
        start + layout.q_means,
        start + layout.q_mean_units,
        start + layout.k_means,
        start + layout.k_sizes,
        q_heads,
        q_len,
        layout.q_blocks,
        q_block_tokens,
        kv_launch,
        smooth_q,
        scale * LOG2_E,
    )
    return Packed(buffer, layout)


def smoothed_away(
    packed: Packed,
    q_heads: int,
    k: torch.Tensor,
    live_keys: torch.Tensor | None,
    delta: torch.Tensor,
    *,
    heads: range,
    q_blocks: range,
    causal: bool,
) -> None:
    """Enqueue the scores that smoothing took from some blocks of Q: mean(block) (K - mean(K))^T.

    heads: of all batches, counted through. delta: uint8, at least len(heads) * len(q_blocks) *
    kv_blocks * DELTA_BYTES; laid out as the attention kernel reads it.
    """
    layout, start = packed.layout, packed.buffer.data_ptr()
    tiles = parts(len(q_blocks), _DELTA_Q_BLOCKS)
    launch(
        _DELTA[layout.head_dim, k.dtype],
        k.device.index,
        layout.kv_blocks * tiles * len(heads),
        *view(k),
        *live_view(live_keys),
        start + layout.q_means,
        start + layout.q_mean_units,
        start + layout.kv_scales,
        start + layout.k_means,
        start + layout.k_sizes,
        delta.data_ptr(),
        q_heads,
        k.shape[1],
        k.shape[2],
        k.shape[3],
        layout.q_blocks,
        layout.q_block_tokens,
        layout.kv_blocks,
        heads.start,
        q_blocks.start,
        len(q_blocks),
        causal,
    )


@lru_cache(maxsize=4096)
def lay_out(
    batch: int,
    q_heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    channels: int,
    q_block_tokens: int,
    device: int,
) -> Layout:
    """Kept, as this arithmetic would cost microseconds in every call."""
    head_dim = padded_head_dim(channels)
    k_dim = padded_k_dim(head_dim)
    q_blocks, kv_blocks = cut_in_blocks(q_len, kv_len, q_block_tokens)
    chunks, chunk_tokens = chunk(batch * kv_heads * 2, kv_len, device)
    rows, key_heads = batch * q_heads * q_len, batch * kv_heads
    sizes = {
        "q_codes": rows * k_dim // 2,
        "q_scales": rows * k_dim // 16,
        "q_factors": batch * q_heads * q_blocks * 8,
        "q_means": batch * q_heads * q_blocks * k_dim * 2,
        "q_mean_units": batch * q_heads * q_blocks * 4,
        "kv": key_heads * kv_blocks * kv_block_bytes(head_dim),
        "kv_scales": key_heads * 2 * 4,
        "k_means": key_heads * head_dim * 4,
        "k_sizes": key_heads * 4,
        "v_means": key_heads * head_dim * 4,
        # One piece: heads of K, then of Q.
        "k_deviations": (key_heads + batch * q_heads) * head_dim * 4,
        "partials": key_heads * 2 * chunks * partial_floats(head_dim) * 4,
    }
    places = place(sizes)
    return Layout(
        head_dim=head_dim,
        k_dim=k_dim,
        q_blocks=q_blocks,
        q_block_tokens=q_block_tokens,
        kv_blocks=kv_blocks,
        kv_block_bytes=kv_block_bytes(head_dim),
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        blocks_each=blocks_each(2 * key_heads * kv_blocks, device),
        **places,
        q_deviations=places["k_deviations"] + key_heads * head_dim * 4,
    )


def cut_in_blocks(q_len: int, kv_len: int, q_block_tokens: int) -> tuple[int, int]:
    """How many blocks of queries and of keys, whole ones for a block of threads and its tiles."""
    return (
        Q_BLOCKS * parts(q_len, Q_BLOCKS * q_block_tokens),
        TILE_BLOCKS * parts(kv_len, TILE_BLOCKS * BLOCK_KEYS),
    )


def values(v: torch.Tensor, live_keys: torch.Tensor | None, layout, start: int) -> tuple:
    """C++'s ``Values``: v [B, Hk, Nk, D], and its parts of the buffer at ``start``."""
    return (
        *view(v),
        *live_view(live_keys),
        start + layout.partials,
        start + layout.kv,
        start + layout.kv_scales,
        start + layout.v_means,
        *v.shape[1:],
        layout.kv_blocks,
        layout.chunks,
        layout.chunk_tokens,
        layout.blocks_each,
    )


def partial_floats(head_dim: int) -> int:
    """PARTIAL_FLOATS of fp4_quantise.cuh."""
    return 3 * head_dim + 4


def padded_k_dim(head_dim: int) -> int:
    """Channels of Q and K as they are multiplied: PADDED_DIM of fp4_layout.cuh."""
    return parts(head_dim, 64) * 64


def kv_block_bytes(head_dim: int) -> int:
    """KvBlock of fp4_layout.cuh: 32 bytes of codes and 4 of scales per channel of K and of V."""
    return (padded_k_dim(head_dim) + head_dim) * 36
