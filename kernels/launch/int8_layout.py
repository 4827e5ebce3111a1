"""How a call of INT8 attention is cut up and where its parts lie: all that depends on no address.

A model makes the same call thousands of times, so this is worked out once per kind of call. The
bytes within a part: kernels/cuda/int8_layout.cuh.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

HEAD_DIMS = (64, 96, 128, 256)  # others are padded to the next
VECTOR_BYTES = 16
BLOCK_KEYS = 64
Q_TOKENS, K_TOKENS, VALUE_TOKENS = 128, 512, 256  # per block of threads of the quantising kernels
# V up to this long is packed in the first launch, by blocks that all read the whole of it.
SHORT = 1024
MOST_CHUNKS = 32  # every block of the packing kernel reads the ranges of all of them
SMALLEST_CHUNK = 256  # tokens
ALIGNMENT = 256  # bytes, of the parts of the buffer


class Layout(NamedTuple):
    """Offsets are bytes in one buffer; views are strides (batch, head, token) in elements."""

    head_dim: int  # one of HEAD_DIMS
    blocks: int  # of BLOCK_KEYS keys, per (batch, key head)
    chunks: int  # of tokens that V's ranges are found in; 0: V is short
    chunk_tokens: int
    quantise_blocks: int  # of threads
    pack_blocks: int  # likewise

    q_codes: int
    q_scales: int
    k_codes: int
    v_codes: int
    k_scales: int
    k_means: int
    v_channels: int
    v_ranges: int
    bytes: int

    q_view: tuple[int, ...]
    k_view: tuple[int, ...]
    v_view: tuple[int, ...]
    out_view: tuple[int, ...]
    in_vectors: bool  # every token starts on VECTOR_BYTES if the first one of its tensor does
    token_major: bool  # torch.empty_like(q) is


def lay_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Layout:
    """q [B, Hq, Nq, D], k, v [B, Hk, Nk, D], all of one dtype and on one GPU; D at most 256."""
    return _lay_out(
        q.shape, q.stride(), k.shape, k.stride(), v.stride(), q.itemsize, q.get_device()
    )


@lru_cache(maxsize=4096)
def _lay_out(q_shape, q_stride, k_shape, k_stride, v_stride, itemsize: int, device: int) -> Layout:
    batch, q_heads, q_len, channels = q_shape
    _, kv_heads, kv_len, _ = k_shape
    head_dim = padded_head_dim(channels)
    kv_total = batch * kv_heads
    blocks = 2 * parts(kv_len, 2 * BLOCK_KEYS)
    chunks, chunk_tokens = (0, 0) if kv_len <= SHORT else cut(kv_total, kv_len, device)
    value_blocks = kv_total * parts(blocks * BLOCK_KEYS, VALUE_TOKENS)
    k_blocks = kv_total * parts(blocks * BLOCK_KEYS, K_TOKENS)
    q_blocks = batch * q_heads * parts(q_len, Q_TOKENS)
    kv_bytes = kv_total * blocks * BLOCK_KEYS * head_dim
    sizes = {
        "q_codes": batch * q_heads * q_len * head_dim,
        "q_scales": batch * q_heads * q_len * 4,
        "k_codes": kv_bytes,
        "v_codes": kv_bytes,
        "k_scales": kv_total * blocks * 16,
        "k_means": kv_total * head_dim * 4,
        "v_channels": kv_total * 2 * head_dim * 4,
        "v_ranges": kv_total * chunks * 2 * head_dim * 4,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += parts(size, ALIGNMENT) * ALIGNMENT
    return Layout(
        head_dim=head_dim,
        blocks=blocks,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        quantise_blocks=k_blocks + q_blocks + (kv_total * chunks or value_blocks),
        pack_blocks=value_blocks,
        **offsets,
        bytes=end,
        q_view=q_stride[:3],
        k_view=k_stride[:3],
        v_view=v_stride[:3],
        out_view=(q_len * q_heads * channels, channels, q_heads * channels),
        in_vectors=all(
            _in_vectors(shape, stride, itemsize)
            for shape, stride in ((q_shape, q_stride), (k_shape, k_stride), (k_shape, v_stride))
        ),
        token_major=q_stride == (q_len * q_heads * channels, channels, q_heads * channels, 1),
    )


def padded_head_dim(channels: int) -> int:
    return next(d for d in HEAD_DIMS if d >= channels)


def _in_vectors(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> bool:
    per_vector = VECTOR_BYTES // itemsize
    steps = zip(shape[:-1], stride[:-1], strict=True)
    return (
        shape[-1] % 8 == 0
        and stride[-1] == 1
        and all(size == 1 or step % per_vector == 0 for size, step in steps)
    )


def cut(heads: int, tokens: int, device: int) -> tuple[int, int]:
    """Into how many chunks of how many tokens each of ``heads`` heads is cut, to be reduced."""
    wanted = parts(4 * _multiprocessors(device), heads)
    chunks = max(1, min(wanted, MOST_CHUNKS, tokens // SMALLEST_CHUNK))
    size = parts(tokens, chunks)
    return parts(tokens, size), size


@lru_cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def parts(whole: int, part: int) -> int:
    return -(-whole // part)
