"""Attention on the FP4 tensor cores of compute capability 12.x, or on an emulation of them.

Precision fp4: both products in NVFP4. Precision int8_fp4: Q K^T in INT8, P V in NVFP4.

Sources: SageAttention3 (arXiv 2505.11594) for the scheme, the permuted K and the two levels of P's
scale; docs/fp4.md says what is done otherwise here, and why. The emulated kernels have run on an
H200; the native ones have not run on any GPU yet.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..backend import token_major_like
from ..jit.loader import launch
from ..jit.variants import Variant
from . import fp4_quantise, int8_fp4_quantise
from .fp4_quantise import DELTA_BYTES, NATIVE_SM, Q_BLOCKS, Packed, smoothed_away
from .geometry import padded_head_dim
from .operands import (
    CODES,
    MASK,
    OUTPUT,
    find_live_keys,
    first_channels,
    in_reach,
    mask_view,
    readable,
    true_lse,
    view,
)

NATIVE, EMULATED = "NativeFp4", "EmulatedFp4"  # structs of kernels/cuda/fp4_mma.cuh

# Of smoothed-away scores at a time. They take 8 bytes per key and block of queries, which at 128k
# tokens would be gigabytes per head; so long calls are launched in pieces.
MOST_DELTA_BYTES = 64 << 20

_NEVER_AHEAD = 1000  # above every compute capability


class Tile(NamedTuple):
    """What one block of the attention kernel works on; two blocks of queries share it."""

    warps: int  # of 16 rows each
    stages: int  # tiles of keys in shared memory
    blocks: int = 2  # of keys in a tile

    @property
    def rows(self) -> int:
        return 16 * self.warps

    @property
    def q_block_tokens(self) -> int:
        return self.rows // Q_BLOCKS


# As many warps as registers allow without spills: three or four per scheduler, so that one's
# softmax runs beside another's products; stages as shared memory allows. By the compiler's counts;
# none was timed.
TILES: dict[tuple[str, int, bool], Tile] = {  # (precision, head_dim, masked)
    ("fp4", 64, False): Tile(warps=16, stages=4),
    ("fp4", 64, True): Tile(warps=12, stages=4),
    ("fp4", 96, False): Tile(warps=12, stages=4),
    ("fp4", 96, True): Tile(warps=8, stages=4),
    ("fp4", 128, False): Tile(warps=12, stages=4),
    ("fp4", 128, True): Tile(warps=8, stages=4),
    ("fp4", 256, False): Tile(warps=8, stages=2),
    ("fp4", 256, True): Tile(warps=8, stages=2),
    ("int8_fp4", 64, False): Tile(warps=16, stages=4),
    ("int8_fp4", 64, True): Tile(warps=12, stages=4),
    ("int8_fp4", 96, False): Tile(warps=12, stages=4),
    ("int8_fp4", 96, True): Tile(warps=8, stages=4),
    ("int8_fp4", 128, False): Tile(warps=12, stages=3),
    ("int8_fp4", 128, True): Tile(warps=8, stages=3),
    ("int8_fp4", 256, False): Tile(warps=8, stages=3, blocks=1),
    ("int8_fp4", 256, True): Tile(warps=8, stages=3, blocks=1),
}

# Bytes of spilled registers put up with in native kernels, by (precision, head_dim, masked).
_SPILLS = {("fp4", 256, True): 48}
_SPILL_REASON = "256 channels take 150 of the 255 registers for Q and the sums alone"
_EMULATION_SPILLS = 4096
_EMULATION_REASON = "beside some 250 instructions per emulated product, spills cost little"


def attention_variant(
    fp4: str, precision: str, head_dim: int, smooth_q: bool, masked: bool
) -> Variant:
    key = precision, head_dim, masked
    tile, native = TILES[key], fp4 == NATIVE
    smoothed = str(smooth_q).lower()
    scores = f"Fp4Scores<{fp4}, {head_dim}, {smoothed}>"
    block_bytes = fp4_quantise.kv_block_bytes(head_dim)
    if precision == "int8_fp4":
        scores = f"Int8Scores<{head_dim}>"
        block_bytes = int8_fp4_quantise.kv_block_bytes(head_dim)
    # What smoothing took from two blocks of Q lies beside each block of keys.
    stage = tile.blocks * (block_bytes + (Q_BLOCKS * DELTA_BYTES if smooth_q else 0))
    return Variant(
        source="sm120_fp4_attention.cu",
        kernel="sm120_fp4_attention",
        template=(fp4, scores, tile.warps, tile.stages, tile.blocks, masked),
        params=f"7Q{MASK}{OUTPUT}Q12i",
        threads=32 * tile.warps,
        shared_bytes=tile.stages * (stage + 16),  # 16: two barriers
        **gpus_of(fp4, needed=smooth_q or precision == "int8_fp4"),
        spill_bytes=_SPILLS.get(key, 0) if native else _EMULATION_SPILLS,
        spill_reason=_SPILL_REASON if native else _EMULATION_REASON,
    )


def gpus_of(fp4: str, *, needed: bool) -> dict[str, int]:
    """The GPUs that a variant is for, and those whose installations build it if it is ``needed``.

    The emulation is for all of them, and part of the proof that those with FP4 units must give.
    """
    return {
        "first_sm": NATIVE_SM if fp4 == NATIVE else 80,
        "ahead_from": NATIVE_SM if needed else _NEVER_AHEAD,
    }


_ATTENTION = {
    (fp4, precision, head_dim, smooth_q, masked): attention_variant(
        fp4, precision, head_dim, smooth_q, masked
    )
    for fp4 in (NATIVE, EMULATED)
    for precision, head_dim, masked in TILES
    for smooth_q in ((False, True) if precision == "fp4" else (False,))
}
VARIANTS = tuple(_ATTENTION.values())


class Piece(NamedTuple):
    """What one launch of the attention kernel takes on."""

    heads: range  # of all batches, counted through
    row_blocks: range  # of each head


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    precision: str = "fp4",
    fp4: str = NATIVE,
    smooth_q: bool = True,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale Q K^T + mask) V`` with P V in NVFP4: [B, Hq, Nq, D], token-major in memory.

    q: [B, Hq, Nq, D]; k, v: [B, Hk, Nk, D], all fp16, bf16 or fp32, D up to 256. mask: None, bool
    (True = attend) or additive, [B|1, Hq|1, Nq|1, Nk|1]. precision: fp4 or int8_fp4. fp4: NATIVE or
    EMULATED. smooth_q: blocks of queries lose their mean; of fp4 only. return_lse: also the
    logarithm of the sum of each row's exponentiated scores, FP32 [B, Hq, Nq].
    """
    k, v, mask = in_reach(k, v, mask, causal, q)
    channels = q.shape[3]
    q, k, v = readable(q, k, v)
    live_keys = find_live_keys(mask, causal, q, k)
    smooth_q = smooth_q and precision == "fp4"
    packed = pack(q, k, v, precision, live_keys, scale, masked=mask is not None, smooth_q=smooth_q)
    out = token_major_like(q)
    lse = None
    if return_lse:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    launch_attention(
        packed,
        q,
        k,
        mask,
        live_keys,
        causal,
        out,
        lse,
        precision=precision,
        fp4=fp4,
        smooth_q=smooth_q,
    )
    out = first_channels(out, channels)
    if not return_lse:
        return out
    key_mean = packed.part("k_means", torch.float32, *k.shape[:2], 1, packed.layout.head_dim)
    return out, true_lse(lse, q, key_mean[..., : q.shape[3]], scale)


def pack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    precision: str,
    live_keys: torch.Tensor | None,
    scale: float,
    *,
    masked: bool,
    smooth_q: bool,
) -> Packed:
    """Q, K and V for the attention kernel of this head_dim; see ``fp4_quantise.quantise``."""
    tile = TILES[precision, padded_head_dim(q.shape[3]), masked]
    options = {"live_keys": live_keys, "scale": scale, "q_block_tokens": tile.q_block_tokens}
    if precision == "int8_fp4":
        return int8_fp4_quantise.quantise(q, k, v, **options)
    return fp4_quantise.quantise(q, k, v, **options, smooth_q=smooth_q)


def launch_attention(
    packed: Packed,
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    live_keys: torch.Tensor | None,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    precision: str,
    fp4: str,
    smooth_q: bool,
) -> None:
    """Enqueue the attention kernel on quantised operands, piece by piece.

    Writes ``out`` [B, Hq, Nq, D] and, if given, ``lse`` [B, Hq, Nq].
    """
    layout = packed.layout
    start = packed.buffer.data_ptr()
    batch, q_heads, q_len, channels = q.shape
    row_blocks = layout.q_blocks // Q_BLOCKS
    variant = _ATTENTION[fp4, precision, layout.head_dim, smooth_q, mask is not None]
    mask_values, out_values = mask_view(mask), view(out)
    bytes_per_row_block = layout.kv_blocks * Q_BLOCKS * DELTA_BYTES if smooth_q else 0
    pieces = list(cut(batch * q_heads, row_blocks, bytes_per_row_block))
    delta, delta_start = None, 0
    if smooth_q:
        most = max(len(piece.heads) * len(piece.row_blocks) for piece in pieces)
        delta = torch.empty(most * bytes_per_row_block, dtype=torch.uint8, device=q.device)
        delta_start = delta.data_ptr()
    for heads, blocks in pieces:
        if smooth_q:
            q_blocks = range(Q_BLOCKS * blocks.start, Q_BLOCKS * blocks.stop)
            smoothed_away(
                packed, q_heads, k, live_keys, delta, heads=heads, q_blocks=q_blocks, causal=causal
            )
        launch(
            variant,
            q.device.index,
            len(blocks) * len(heads),
            start + layout.q_codes,
            start + layout.q_scales,
            start + layout.q_factors if precision == "fp4" else 0,
            start + layout.kv,
            start + layout.kv_scales,
            start + layout.v_means,
            delta_start,
            *mask_values,
            *out_values,
            0 if lse is None else lse.data_ptr(),
            q_heads,
            k.shape[1],
            q_len,
            k.shape[2],
            channels,
            layout.q_blocks,
            layout.kv_blocks,
            heads.start,
            blocks.start,
            len(blocks),
            causal,
            CODES[out.dtype],
        )


def cut(heads: int, row_blocks: int, bytes_per_row_block: int) -> Iterator[Piece]:
    """Pieces whose smoothed-away scores fit ``MOST_DELTA_BYTES``: whole heads, or parts of one.

    A block of rows that does not fit alone is a piece all the same.
    """
    fit = heads * row_blocks
    if bytes_per_row_block:
        fit = max(1, MOST_DELTA_BYTES // bytes_per_row_block)
    head_step, row_step = max(1, fit // row_blocks), min(fit, row_blocks)
    for head in range(0, heads, head_step):
        for row in range(0, row_blocks, row_step):
            yield Piece(
                range(head, min(head + head_step, heads)),
                range(row, min(row + row_step, row_blocks)),
            )
