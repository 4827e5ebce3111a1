"""Q, K and V to INT8: one launch, or two where V is long. What is done to V: int8_values.cuh."""

from typing import NamedTuple

import torch

from ..jit.loader import launch
from ..jit.variants import Variant
from . import operands
from .geometry import HEAD_DIMS
from .int8_layout import (
    BLOCK_KEYS,
    VALUE_SIZES_BYTES,
    VIEW_BYTES,
    WGMMA_HEAD_DIMS,
    WGMMA_KEYS,
    Layout,
    lay_out,
)
from .operands import DTYPES, LIVE_KEYS, LOG2_E, aligned, live_view

_TENSOR = f"Q{VIEW_BYTES}s"
_VALUES = f"{_TENSOR}{LIVE_KEYS}3Q{VALUE_SIZES_BYTES}s"  # struct Values
_THREADS = 256


def _quantise(head_dim: int, dtype: torch.dtype, tile_keys: int) -> Variant:
    return Variant(
        source="sm80_int8_quantise.cu",
        kernel="sm80_int8_quantise",
        template=(head_dim, DTYPES[dtype], tile_keys),
        params=f"{_TENSOR * 2}{_VALUES}5Q3if",
        threads=_THREADS,
        min_blocks=2 if head_dim * dtype.itemsize <= 256 else 1,
        **({} if tile_keys == BLOCK_KEYS else {"first_sm": 90, "last_sm": 90}),
    )


def _pack_values(head_dim: int, dtype: torch.dtype) -> Variant:
    return Variant(
        source="sm80_int8_pack_values.cu",
        kernel="sm80_int8_pack_values",
        template=(head_dim, DTYPES[dtype]),
        params=_VALUES,
        threads=_THREADS,
        min_blocks=2 if dtype == torch.float32 else 3,
    )


_QUANTISE = {
    (d, t, n): _quantise(d, t, n)
    for d in HEAD_DIMS
    for t in DTYPES
    for n in (BLOCK_KEYS, WGMMA_KEYS)
    if n == BLOCK_KEYS or d in WGMMA_HEAD_DIMS
}
_PACK_VALUES = {(d, t): _pack_values(d, t) for d in HEAD_DIMS for t in DTYPES}
VARIANTS = (*_QUANTISE.values(), *_PACK_VALUES.values())


class Packed(NamedTuple):
    """Q, K and V as the attention kernel reads them."""

    buffer: torch.Tensor  # uint8
    layout: Layout

    def key_mean(self, k: torch.Tensor) -> torch.Tensor:
        """What smoothing took from every token of K [B, Hk, Nk, D]: [B, Hk, 1, D], FP32."""
        batch, heads, _, channels = k.shape
        head_dim = self.layout.head_dim
        means = self.buffer[self.layout.k_means :][: batch * heads * head_dim * 4]
        means = means.view(torch.float32).view(batch, heads, 1, head_dim)
        return means[..., :channels]


def quantise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    live_keys: torch.Tensor | None,
    scale: float,
) -> Packed:
    """Smooth K and V, rotate Q and K, quantise all three.

    Enqueues one or two kernels, never syncs.

    q [B, Hq, Nq, D], k, v [B, Hk, Nk, D] and their layout as :func:`readable` gives them.
    live_keys: bool [B|1, Hk|1, Nk], contiguous in the last dimension: keys that some query sees;
    None: all. scale: of the softmax.
    """
    device = q.get_device()
    buffer = q.new_empty(layout.bytes, dtype=torch.uint8)
    start = buffer.data_ptr()
    values = (
        v.data_ptr(),
        layout.v_view,
        *live_view(live_keys),
        start + layout.v_codes,
        start + layout.v_channels,
        start + layout.v_ranges,
        layout.value_sizes,
    )
    launch(
        _QUANTISE[layout.head_dim, q.dtype, layout.tile_keys],
        device,
        layout.quantise_blocks,
        q.data_ptr(),
        layout.q_view,
        k.data_ptr(),
        layout.k_view,
        *values,
        start + layout.q_codes,
        start + layout.q_scales,
        start + layout.k_codes,
        start + layout.k_scales,
        start + layout.k_means,
        *layout.query_sizes,
        scale * LOG2_E,
    )
    if layout.chunks:
        launch(_PACK_VALUES[layout.head_dim, q.dtype], device, layout.pack_blocks, *values)
    return Packed(buffer, layout)


def readable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile_keys: int = BLOCK_KEYS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Layout]:
    """``operands.readable``, and the layout, which knows most of the answer already."""
    layout = lay_out(q, k, v, tile_keys)
    if layout.in_vectors and aligned(q, k, v):
        return q, k, v, layout
    q, k, v = operands.readable(q, k, v)
    return q, k, v, lay_out(q, k, v, tile_keys)
