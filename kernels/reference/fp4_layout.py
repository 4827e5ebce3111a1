"""Bytes of NVFP4 K and V as kernels/cuda/fp4_layout.cuh lays them out, in plain torch.

The header decides; this is a second reading of it, with which tests compare what kernels write.
"""

from typing import NamedTuple

import torch

from .formats import NVFP4_BLOCK, pack_nibbles, unpack_nibbles

BLOCK_KEYS = 64
STEP_CHANNELS = 64  # of one matrix product: Q and K are padded to a multiple
_ROW_BYTES = 32


class KvCodes(NamedTuple):
    """Blocks of 64 keys, uint8: 4-bit codes and E4M3 codes of the scales of sixteen.

    k [..., 64, k_dim] and k_scales [..., 64, k_dim / 16] in the order of keys; v [..., D, 64] and
    v_scales [..., D, 4].
    """

    k: torch.Tensor
    k_scales: torch.Tensor
    v: torch.Tensor
    v_scales: torch.Tensor


def k_dim(head_dim: int) -> int:
    return -(-head_dim // STEP_CHANNELS) * STEP_CHANNELS


def block_bytes(head_dim: int) -> int:
    return (k_dim(head_dim) + head_dim) * (_ROW_BYTES + BLOCK_KEYS // NVFP4_BLOCK)


def rows_of_keys() -> torch.Tensor:
    """Row of a block of K that holds each of its 64 keys: 32n + 8t + 2j + e lies in 8j + 2t + e."""
    key = torch.arange(BLOCK_KEYS)
    t, j, e = key // 8 % 4, key // 2 % 4, key % 2
    return key // 32 * 32 + 8 * j + 2 * t + e


def pack_blocks(codes: KvCodes) -> torch.Tensor:
    """[..., bytes] of blocks."""
    rows = rows_of_keys().argsort()  # the key in each row
    k = pack_nibbles(codes.k[..., rows, :]).unflatten(-1, (-1, _ROW_BYTES)).movedim(-2, -3)
    k_scales = codes.k_scales[..., rows, :]
    parts = _swap_halves(k).flatten(-3), _swap_halves(pack_nibbles(codes.v)).flatten(-2)
    return torch.cat([*parts, k_scales.flatten(-2), codes.v_scales.flatten(-2)], -1)


def unpack_blocks(blocks: torch.Tensor, head_dim: int) -> KvCodes:
    """Inverse of :func:`pack_blocks` on [..., bytes]."""
    channels = k_dim(head_dim)
    shapes = {
        "k": (channels // STEP_CHANNELS, BLOCK_KEYS, _ROW_BYTES),
        "v": (head_dim, _ROW_BYTES),
        "k_scales": (BLOCK_KEYS, channels // NVFP4_BLOCK),
        "v_scales": (head_dim, BLOCK_KEYS // NVFP4_BLOCK),
    }
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = blocks.split(sizes, -1)
    parts = [part.unflatten(-1, shape) for part, shape in zip(parts, shapes.values(), strict=True)]
    k, v, k_scales, v_scales = parts
    rows = rows_of_keys()
    k = unpack_nibbles(_swap_halves(k).movedim(-3, -2).flatten(-2))
    return KvCodes(
        k[..., rows, :], k_scales[..., rows, :], unpack_nibbles(_swap_halves(v)), v_scales
    )


# ------------------------------------------------------------------------------- keys in INT8
class Int8KvCodes(NamedTuple):
    """Blocks of 64 keys: k int8 [..., 64, D] in the order of keys, k_scales FP32 [..., 4].

    Scale t is that of the keys 32n + 8t .. 32n + 8t + 7. v and v_scales as above.
    """

    k: torch.Tensor
    k_scales: torch.Tensor
    v: torch.Tensor
    v_scales: torch.Tensor


def int8_block_bytes(head_dim: int) -> int:
    return BLOCK_KEYS * head_dim + head_dim * (_ROW_BYTES + BLOCK_KEYS // NVFP4_BLOCK) + 128


def unpack_int8_blocks(blocks: torch.Tensor, head_dim: int) -> Int8KvCodes:
    """What lies in [..., bytes] of blocks whose K is in INT8."""
    v_bytes, groups = head_dim * _ROW_BYTES, BLOCK_KEYS // NVFP4_BLOCK
    k, v, k_scales, v_scales = blocks.split(
        [BLOCK_KEYS * head_dim, v_bytes, 128, head_dim * groups], -1
    )
    k = k.unflatten(-1, (head_dim // _ROW_BYTES, BLOCK_KEYS, _ROW_BYTES))
    k = _swap_halves(k).movedim(-3, -2).flatten(-2)[..., rows_of_keys(), :]
    return Int8KvCodes(
        k.view(torch.int8),
        k_scales[..., :16].contiguous().view(torch.float32),
        unpack_nibbles(_swap_halves(v.unflatten(-1, (head_dim, _ROW_BYTES)))),
        v_scales.unflatten(-1, (head_dim, groups)),
    )


def int8_scale_of_keys() -> torch.Tensor:
    """Which of a block's four scales each of its 64 keys has."""
    return torch.arange(BLOCK_KEYS) // 8 % 4


def _swap_halves(panel: torch.Tensor) -> torch.Tensor:
    """[..., rows, 32] with the 16-byte halves of rows with bit 2 set swapped: its own inverse."""
    swapped = panel.roll(_ROW_BYTES // 2, -1)
    odd = torch.arange(panel.shape[-2], device=panel.device) & 4
    return torch.where(odd[:, None] != 0, swapped, panel)
