"""INT8 attention on mma.sync, for compute capabilities 8.0 to 12.x.

Sources: SageAttention2 (arXiv 2411.10958) for smoothed K and for scales per thread of the matrix
product. P in 0..255 with a scale per row and tile, smoothed V, and both products in integers are
this project's; docs/kernel-notes-int8.md has the figures.
"""

from typing import NamedTuple

import torch

from ..backend import Backend, Capability
from ..jit.loader import launch
from ..jit.variants import Variant
from .geometry import parts
from .int8_attention import Int8Attention
from .int8_layout import Layout
from .int8_quantise import Packed, quantise
from .operands import (
    CODES,
    CONSTRAINTS,
    MASK,
    OUTPUT,
    find_live_keys,
    in_one_dtype,
    mask_view,
)


class Tile(NamedTuple):
    """What one block of the attention kernel works on; chosen by measurement, see ``TILES``."""

    keys: int  # per step
    warps: int  # of 16 rows each
    min_blocks: int  # resident per multiprocessor

    @property
    def rows(self) -> int:
        return 16 * self.warps


# On an H200, B2 H24 S4096 D128: two blocks of four warps take 0.741 ms, one of eight 0.774 (all
# warps wait for the same barriers), three of four 0.786 (168 registers per thread spill). D64, 128
# keys a step: 0.479 ms, 64 keys: 0.515. Masked tiles were not compared.
TILES: dict[tuple[int, bool], Tile] = {  # (head_dim, masked)
    (64, False): Tile(keys=128, warps=4, min_blocks=2),
    (64, True): Tile(keys=64, warps=4, min_blocks=3),
    (96, False): Tile(keys=64, warps=4, min_blocks=2),
    (96, True): Tile(keys=64, warps=4, min_blocks=2),
    (128, False): Tile(keys=64, warps=4, min_blocks=2),
    (128, True): Tile(keys=64, warps=4, min_blocks=2),
    (256, False): Tile(keys=64, warps=8, min_blocks=1),
    (256, True): Tile(keys=64, warps=8, min_blocks=1),
}


# Bytes of spilled registers put up with, by (head_dim, masked): the most on any chip.
_SPILLS = {(256, False): 960, (256, True): 720}
_SPILL_REASON = "256 channels take 160 of the 255 registers for Q and the sums alone"


def attention_variant(head_dim: int, masked: bool, tile: Tile) -> Variant:
    return Variant(
        source="sm80_int8_attention.cu",
        kernel="sm80_int8_attention",
        template=(head_dim, tile.keys, tile.warps, masked, tile.min_blocks),
        params=f"6Q{MASK}{OUTPUT}Q8i",
        threads=32 * tile.warps,
        min_blocks=tile.min_blocks,
        shared_bytes=2 * 2 * tile.keys * head_dim,  # two stages of a tile of K and one of V
        spill_bytes=_SPILLS.get((head_dim, masked), 0),
        spill_reason=_SPILL_REASON,
    )


_ATTENTION = {key: (attention_variant(*key, tile), tile.rows) for key, tile in TILES.items()}
VARIANTS = tuple(variant for variant, _ in _ATTENTION.values())


def _attend_readable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    lse: torch.Tensor | None,
    *,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, Packed]:
    """What ``Int8Attention`` asks for."""
    live_keys = find_live_keys(mask, causal, q, k)
    packed = quantise(q, k, v, layout, live_keys=live_keys, scale=scale)
    out = layout.output_like(q)
    start = packed.buffer.data_ptr()
    variant, rows = _ATTENTION[layout.head_dim, mask is not None]
    batch, q_heads, q_len = layout.query_sizes
    launch(
        variant,
        q.get_device(),
        batch * q_heads * parts(q_len, rows),
        start + layout.q_codes,
        start + layout.q_scales,
        start + layout.k_codes,
        start + layout.v_codes,
        start + layout.k_scales,
        start + layout.v_channels,
        *mask_view(mask),
        out.data_ptr(),
        *layout.out_view,
        0 if lse is None else lse.data_ptr(),
        *layout.attention_sizes,
        causal,
        CODES[out.dtype],
    )
    return out, packed


_INT8 = Int8Attention(_attend_readable)
attend, attend_smoothed = _INT8.attend, _INT8.attend_smoothed

SM80_INT8 = Backend(
    name="sm80_int8",
    precisions=("int8",),
    native=True,
    constraints=(Capability((8, 0), (12, 1)), *CONSTRAINTS),
    forward=in_one_dtype(attend),
    prepare=_INT8.prepare,
)
