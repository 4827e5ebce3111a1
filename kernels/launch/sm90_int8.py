"""INT8 attention on wgmma, for compute capability 9.0: Q K^T in 8 bits, P V in the 16 of V.

Sources: FlashAttention-3 (arXiv 2407.08608) for two warpgroups that fill each other's gaps and for
scores of the next tile beside P V of this one; FlashAttention-4's report for rescaling only where a
maximum has moved far. docs/kernel-notes-int8.md has the figures.
"""

from typing import NamedTuple

import torch

from ..backend import Backend, Capability, Dtypes, HeadDimIn, OneDtype, Unmasked
from ..jit.loader import launch
from ..jit.variants import Variant
from .geometry import parts
from .int8_quantise import Packed, quantise, readable
from .operands import DTYPES, OUTPUT, TENSOR, first_channels, in_reach, true_lse, view

# As in the kernel. On an H200, B2 H24 S16384 bf16, these reach 652 TOPS without quantising; three
# stages 550, tiles of 64 keys at most 606, warpgroups that issue their products as it comes 604.
# With 64 channels the best tile reached 395, sm80_int8 459: exponentials are what binds there.
HEAD_DIM = 128
ROWS, KEYS, STAGES = 128, 128, 4
THREADS = 384


def _attention(dtype: torch.dtype) -> Variant:
    return Variant(
        source="sm90_int8_attention.cu",
        kernel="sm90_int8_attention",
        template=(DTYPES[dtype],),
        params=f"4Q{TENSOR}{OUTPUT}Q7i",
        threads=THREADS,
        shared_bytes=STAGES * (KEYS * HEAD_DIM * 3 + 3 * 8),
        first_sm=90,
        last_sm=90,
    )


_ATTENTION = {dtype: _attention(dtype) for dtype in (torch.float16, torch.bfloat16)}
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
    """``softmax(scale Q K^T) V`` with Q and K in INT8: [B, Hq, Nq, D], token-major in memory.

    q: [B, Hq, Nq, D]; k, v: [B, Hk, Nk, D], all fp16 or all bf16, D 97 to 128.
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
    channels = q.shape[3]
    q, k, v, packed = pack(q, k, v, scale=scale, causal=causal)
    layout = packed.layout
    out = layout.output_like(q)
    start = packed.buffer.data_ptr()
    batch, q_heads, q_len = layout.query_sizes
    launch(
        _ATTENTION[q.dtype],
        q.get_device(),
        batch * q_heads * parts(q_len, ROWS),
        start + layout.q_codes,
        start + layout.q_scales,
        start + layout.k_codes,
        start + layout.k_scales,
        *view(v),
        out.data_ptr(),
        *layout.out_view,
        0 if lse is None else lse.data_ptr(),
        *layout.attention_sizes,
        causal,
    )
    return first_channels(out, channels), packed


class Operands(NamedTuple):
    """A call's tensors as kernels read them; Q and K quantised."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    packed: Packed


def pack(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> Operands:
    """Arguments as in :func:`attend`. The same arguments give the same codes, bit for bit."""
    k, v, _ = in_reach(k, v, None, causal, q)
    q, k, v, layout = readable(q, k, v, codes_of_v=False)
    return Operands(q, k, v, quantise(q, k, v, layout, live_keys=None, scale=scale))


def _forward(q, k, v, *, precision: str, mask, scale: float, causal: bool) -> torch.Tensor:
    return attend(q, k, v, scale=scale, causal=causal)


SM90_INT8 = Backend(
    name="sm90_int8",
    precisions=("int8",),
    native=True,
    constraints=(
        Capability((9, 0), (9, 0)),
        Dtypes(tuple(_ATTENTION)),
        OneDtype(),
        HeadDimIn(((97, HEAD_DIM),)),
        Unmasked(),
    ),
    forward=_forward,
)
