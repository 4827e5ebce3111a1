"""Q and K to INT8, V to NVFP4, in two launches.

Layouts: kernels/cuda/fp4_layout.cuh; what is done to Q and K: int8_queries_keys.cuh, as for INT8.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from ..jit.loader import launch
from .fp4_quantise import (
    THREADS,
    VALUES,
    Packed,
    cut_in_blocks,
    partial_floats,
    quantiser,
    values,
)
from .geometry import HEAD_DIMS, blocks_each, chunk, padded_head_dim, parts, place
from .int8_layout import BLOCK_KEYS, K_TOKENS, Q_TOKENS
from .operands import DTYPES, LOG2_E, TENSOR, view

_K_SCALE_BYTES = 128  # of a block of keys


def _prologue(head_dim: int, dtype: torch.dtype):
    params = f"{TENSOR * 2}{VALUES}0Q3Q3if"
    blocks = 2 if head_dim * dtype.itemsize <= 256 else 1
    return quantiser(
        "sm80_int8_fp4_prologue", head_dim, dtype, params, threads=THREADS, min_blocks=blocks
    )


def _pack(head_dim: int, dtype: torch.dtype):
    return quantiser(
        "sm80_int8_fp4_pack", head_dim, dtype, f"{VALUES}0Q", threads=THREADS, min_blocks=3
    )


_PROLOGUE = {(d, t): _prologue(d, t) for d in HEAD_DIMS for t in DTYPES}
_PACK = {(d, t): _pack(d, t) for d in HEAD_DIMS for t in DTYPES}
VARIANTS = (*_PROLOGUE.values(), *_PACK.values())


class Layout(NamedTuple):
    """How a call is cut up, and where its parts lie in one buffer: offsets in bytes."""

    head_dim: int  # one of HEAD_DIMS
    q_blocks: int  # per (batch, query head), Q_BLOCKS to a block of the attention kernel's threads
    kv_blocks: int  # of BLOCK_KEYS keys per (batch, key head)
    kv_block_bytes: int
    chunks: int  # of tokens of V, per (batch, key head), that statistics are made of
    chunk_tokens: int
    blocks_each: int  # blocks of keys, of K or of V, that a block of threads packs
    quantise_blocks: int  # of threads
    q_codes: int
    q_scales: int
    kv: int
    kv_scales: int
    k_means: int
    v_means: int
    partials: int
    bytes: int


def quantise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    live_keys: torch.Tensor | None,
    scale: float,
    q_block_tokens: int,
) -> Packed:
    """Rotate Q and K, smooth K and V, quantise all three. Enqueues two kernels, never syncs.

    Arguments as those of ``fp4_quantise.quantise``; q_block_tokens only says how the attention
    kernel cuts Q.
    """
    batch, q_heads, q_len, channels = q.shape
    _, kv_heads, kv_len, _ = k.shape
    device = q.device.index
    layout = lay_out(batch, q_heads, kv_heads, q_len, kv_len, channels, q_block_tokens, device)
    buffer = torch.empty(layout.bytes, dtype=torch.uint8, device=q.device)
    start = buffer.data_ptr()
    key = layout.head_dim, q.dtype
    of_v = values(v, live_keys, layout, start)
    launch(
        _PROLOGUE[key],
        device,
        layout.quantise_blocks,
        *view(q),
        *view(k),
        *of_v,
        start + layout.q_codes,
        start + layout.q_scales,
        start + layout.k_means,
        batch,
        q_heads,
        q_len,
        scale * LOG2_E,
    )
    packers = parts(layout.kv_blocks, layout.blocks_each)
    launch(_PACK[key], device, packers * kv_heads * batch, *of_v)
    return Packed(buffer, layout)


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
    q_blocks, kv_blocks = cut_in_blocks(q_len, kv_len, q_block_tokens)
    rows, key_heads = batch * q_heads * q_len, batch * kv_heads
    chunks, chunk_tokens = chunk(key_heads, kv_len, device)
    quantise_blocks = (
        key_heads * parts(kv_blocks * BLOCK_KEYS, K_TOKENS)
        + batch * q_heads * parts(q_len, Q_TOKENS)
        + key_heads * chunks
    )
    sizes = {
        "q_codes": rows * head_dim,
        "q_scales": rows * 4,
        "kv": key_heads * kv_blocks * kv_block_bytes(head_dim),
        "kv_scales": key_heads * 2 * 4,
        "k_means": key_heads * head_dim * 4,
        "v_means": key_heads * head_dim * 4,
        "partials": key_heads * chunks * partial_floats(head_dim) * 4,
    }
    return Layout(
        head_dim=head_dim,
        q_blocks=q_blocks,
        kv_blocks=kv_blocks,
        kv_block_bytes=kv_block_bytes(head_dim),
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        blocks_each=blocks_each(key_heads * kv_blocks, device),
        quantise_blocks=quantise_blocks,
        **place(sizes),
    )


def kv_block_bytes(head_dim: int) -> int:
    """Int8KvBlock of fp4_layout.cuh: codes of K, codes and scales of V, scales of K."""
    return BLOCK_KEYS * head_dim + 36 * head_dim + _K_SCALE_BYTES
