"""How a call of INT8 attention is cut up and where its parts lie: all that depends on no address.

A model makes the same call thousands of times, so this is worked out once per kind of call. The
bytes within a part: kernels/cuda/int8_layout.cuh.
"""

import struct
from functools import lru_cache
from typing import NamedTuple

import torch

from ..backend import token_major_like
from .geometry import HEAD_DIMS, chunk, padded_head_dim, parts, place
from .operands import in_vectors

BLOCK_KEYS = 64
WGMMA_KEYS = 128  # of a tile of the attention kernel for compute capability 9.0
WGMMA_HEAD_DIMS = (64, 128)
Q_TOKENS, K_TOKENS, VALUE_TOKENS = 256, 512, 256  # per block of threads of the quantising kernels
# V up to this long is packed in the first launch, by blocks that all read the whole of it.
SHORT = 1024

_VIEW, _VALUE_SIZES = struct.Struct("@3q"), struct.Struct("@6i")
VIEW_BYTES, VALUE_SIZES_BYTES = _VIEW.size, _VALUE_SIZES.size


class Layout(NamedTuple):
    """Offsets are bytes in one buffer; views are strides (batch, head, token) in elements.

    Sizes are members of C++ structs in their order: put together here and not at every call.
    """

    head_dim: int  # one of HEAD_DIMS
    tile_keys: int  # of K that lie together, see int8_layout.cuh: BLOCK_KEYS or WGMMA_KEYS
    chunks: int  # of tokens that V's ranges are found in; 0: V is short
    quantise_blocks: int  # of threads
    pack_blocks: int  # likewise
    query_sizes: tuple[int, int, int]  # batch, q_heads, q_len
    value_sizes: bytes  # kv_heads .. chunk_tokens of Values
    attention_sizes: tuple[int, ...]  # q_heads .. blocks of the attention kernel's Params

    q_codes: int
    q_scales: int
    k_codes: int
    v_codes: int
    k_scales: int
    k_means: int
    v_channels: int
    v_ranges: int
    bytes: int

    q_view: bytes
    k_view: bytes
    v_view: bytes
    out_view: tuple[int, ...]
    in_vectors: bool  # every token starts on 16 bytes if the first one of its tensor does
    token_major: bool  # torch.empty_like(q) is

    def output_like(self, q: torch.Tensor) -> torch.Tensor:
        """Memory for the output, token-major."""
        # empty_like saves the time that a transposed view takes to make.
        return torch.empty_like(q) if self.token_major else token_major_like(q)


def lay_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile_keys: int) -> Layout:
    """q [B, Hq, Nq, D], k, v [B, Hk, Nk, D], all of one dtype and on one GPU; D at most 256.

    tile_keys: as in Layout; D is at most 128 where it is WGMMA_KEYS.
    """
    return _lay_out(
        q.shape, q.stride(), k.shape, k.stride(), v.stride(), q.itemsize, q.get_device(), tile_keys
    )


@lru_cache(maxsize=4096)
def _lay_out(
    q_shape, q_stride, k_shape, k_stride, v_stride, itemsize: int, device: int, tile_keys: int
) -> Layout:
    batch, q_heads, q_len, channels = q_shape
    _, kv_heads, kv_len, _ = k_shape
    head_dims = HEAD_DIMS if tile_keys == BLOCK_KEYS else WGMMA_HEAD_DIMS
    head_dim = padded_head_dim(channels, head_dims)
    kv_total = batch * kv_heads
    blocks = 2 * parts(kv_len, 2 * BLOCK_KEYS)
    chunks, chunk_tokens = (0, 0) if kv_len <= SHORT else chunk(kv_total, kv_len, device)
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
    out_view = (q_len * q_heads * channels, channels, q_heads * channels)
    return Layout(
        head_dim=head_dim,
        tile_keys=tile_keys,
        chunks=chunks,
        quantise_blocks=k_blocks + q_blocks + (kv_total * chunks or value_blocks),
        pack_blocks=value_blocks,
        query_sizes=(batch, q_heads, q_len),
        value_sizes=_VALUE_SIZES.pack(kv_heads, kv_len, channels, blocks, chunks, chunk_tokens),
        attention_sizes=(q_heads, kv_heads, q_len, kv_len, channels, blocks),
        **place(sizes),
        q_view=_VIEW.pack(*q_stride[:3]),
        k_view=_VIEW.pack(*k_stride[:3]),
        v_view=_VIEW.pack(*v_stride[:3]),
        out_view=out_view,
        in_vectors=all(
            in_vectors(shape, stride, itemsize)
            for shape, stride in ((q_shape, q_stride), (k_shape, k_stride), (k_shape, v_stride))
        ),
        token_major=q_stride == (*out_view, 1),
    )
