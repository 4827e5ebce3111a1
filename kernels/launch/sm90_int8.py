"""INT8 attention on wgmma, for compute capability 9.0: both products in 8 bits.

Sources: FlashAttention-3 (arXiv 2407.08608) for warpgroups that fill each other's gaps; P as in
sm80_int8. docs/kernel-notes-int8.md has the figures.
"""

import torch

from ..backend import Backend, Capability, Dtypes, HeadDimUpTo, Unmasked
from ..jit.loader import launch
from ..jit.variants import Variant
from .geometry import parts
from .int8_layout import Layout
from .int8_quantise import WGMMA_KEYS, Packed, prepared_by, quantise, readable
from .operands import CODES, DTYPES, OUTPUT, first_channels, in_one_dtype, in_reach, true_lse

ROWS = 192  # as in the kernel, of WGMMA_KEYS a tile
THREADS = 512
STAGES = {64: 8, 96: 8, 128: 6}  # by head_dim: as many as fit, and no more than eight


def _attention(head_dim: int) -> Variant:
    stages = STAGES[head_dim]
    return Variant(
        source="sm90_int8_attention.cu",
        kernel="sm90_int8_attention",
        template=(head_dim, stages),
        params=f"6Q{OUTPUT}Q8i",
        threads=THREADS,
        # Q; for each stage K, V, eight scales of K and four barriers
        shared_bytes=ROWS * head_dim + stages * (2 * WGMMA_KEYS * head_dim + 8 * 4 + 4 * 8),
        first_sm=90,
        last_sm=90,
    )


_ATTENTION = {head_dim: _attention(head_dim) for head_dim in STAGES}
VARIANTS = tuple(_ATTENTION.values())


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale Q K^T) V`` in INT8: [B, Hq, Nq, D], token-major in memory.

    q: [B, Hq, Nq, D]; k, v: [B, Hk, Nk, D], all fp16, bf16 or fp32, D up to 128.
    return_lse: also the logarithm of the sum of each row's exponentiated scores, FP32 [B, Hq, Nq].
    """
    lse = None
    if return_lse:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    out, packed = attend_smoothed(q, k, v, lse, scale=scale, causal=causal)
    return (out, true_lse(lse, q, packed.key_mean(k), scale)) if return_lse else out


def attend_smoothed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, Packed]:
    """As :func:`attend`, with the quantised operands beside the output.

    Writes, if given, ``lse`` [B, Hq, Nq], contiguous: that of the scores of smoothed K.
    """
    k, v, _ = in_reach(k, v, None, causal, q)
    channels = q.shape[3]
    q, k, v, layout = readable(q, k, v)
    out, packed = _attend_readable(q, k, v, layout, lse, mask=None, scale=scale, causal=causal)
    return first_channels(out, channels), packed


def _attend_readable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    lse: torch.Tensor | None = None,
    *,
    mask: None,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, Packed]:
    """As :func:`attend`, of tensors as ``readable`` gives them; ``lse`` is that of smoothed K."""
    packed = quantise(q, k, v, layout, live_keys=None, scale=scale, tile_keys=WGMMA_KEYS)
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


def _forward(q, k, v, *, mask, scale: float, causal: bool) -> torch.Tensor:
    return attend(q, k, v, scale=scale, causal=causal)


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
    forward=in_one_dtype(_forward),
    prepare=prepared_by(_attend_readable),
)
