"""INT8 attention on wgmma, for compute capability 9.0: both products in 8 bits.

Sources: FlashAttention-3 (arXiv 2407.08608) for warpgroups that fill each other's gaps; P as in
sm80_int8. docs/kernel-notes-int8.md has the figures.
"""

import torch

from ..backend import Backend, Capability, Dtypes, HeadDimUpTo, Unmasked
from ..jit.loader import launch
from ..jit.variants import Variant
from .geometry import parts
from .int8_attention import Int8Attention
from .int8_layout import WGMMA_KEYS, Layout
from .int8_quantise import Packed, quantise
from .operands import CODES, DTYPES, OUTPUT, in_one_dtype

ROWS = 192  # as in the kernel, of WGMMA_KEYS a tile
THREADS = 512
STAGES = {64: 8, 128: 6}  # by head_dim: as many as fit, and no more than eight


def _attention(head_dim: int) -> Variant:
    stages = STAGES[head_dim]
    return Variant(
        source="sm90_int8_attention.cu",
        kernel="sm90_int8_attention",
        template=(head_dim, stages),
        params=f"6Q{OUTPUT}Q8i",
        threads=THREADS,
        # Q; for each stage K, V, eight scales of K and four barriers
        shared_bytes=(ROWS + 2 * 4) * head_dim
        + stages * (2 * WGMMA_KEYS * head_dim + 8 * 4 + 4 * 8),
        first_sm=90,
        last_sm=90,
    )


_ATTENTION = {head_dim: _attention(head_dim) for head_dim in STAGES}
VARIANTS = tuple(_ATTENTION.values())


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
    """What ``Int8Attention`` asks for. Raises ValueError for a mask, which dispatch never sends."""
    if mask is not None:
        raise ValueError("sm90_int8 takes no mask")
    packed = quantise(q, k, v, layout, live_keys=None, scale=scale)
    out = layout.output_like(q)
    start = packed.buffer.data_ptr()
    batch, q_heads, q_len = layout.query_sizes
    launch(
        _ATTENTION[layout.head_dim],
        q.get_device(),
        batch * q_heads * parts(q_len, ROWS),
        start + layout.q_codes,
        start + layout.q_scales,
        start + layout.k_codes,
        start + layout.v_codes,
        start + layout.k_scales,
        start + layout.v_channels,
        out.data_ptr(),
        *layout.out_view,
        0 if lse is None else lse.data_ptr(),
        *layout.attention_sizes,
        causal,
        CODES[out.dtype],
    )
    return out, packed


_INT8 = Int8Attention(_attend_readable, WGMMA_KEYS)
attend, attend_smoothed = _INT8.attend, _INT8.attend_smoothed

SM90_INT8 = Backend(
    name="sm90_int8",
    precisions=("int8",),
    native=True,
    constraints=(
        Capability((9, 0), (9, 0)),
        Dtypes(tuple(DTYPES)),
        HeadDimUpTo(max(STAGES)),
        Unmasked(),
    ),
    forward=in_one_dtype(attend),
    prepare=_INT8.prepare,
)
