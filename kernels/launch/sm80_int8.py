"""INT8 attention on mma.sync, for compute capabilities 8.0 to 12.x.

Sources: SageAttention2 (arXiv 2411.10958) for smoothed K and for scales per thread of the matrix
product. P in 0..255 with a scale per row and tile, smoothed V, and both products in integers are
this project's; docs/kernel-notes-int8.md has the figures.
"""

from typing import NamedTuple

import torch

from ..backend import Backend, Capability, Dtypes, HeadDimUpTo
from ..jit.loader import launch
from ..jit.variants import Variant
from ..reference.visibility import Visibility, without_expanded_dims
from .int8_quantise import Packed, quantise, readable

_MASK = "Qqqqqii"
_NO_MASK = (0,) * 7
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.bool: 3}  # enum Dtype


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
_SPILLS = {(256, False): 640, (256, True): 640}
_SPILL_REASON = "256 channels take 160 of the 255 registers for Q and the sums alone"


def attention_variant(head_dim: int, masked: bool, tile: Tile) -> Variant:
    return Variant(
        source="sm80_int8_attention.cu",
        kernel="sm80_int8_attention",
        template=(head_dim, tile.keys, tile.warps, masked, tile.min_blocks),
        params=f"6Q{_MASK}QqqqQ8i",
        threads=32 * tile.warps,
        min_blocks=tile.min_blocks,
        shared_bytes=2 * 2 * tile.keys * head_dim,  # two stages of a tile of K and one of V
        spill_bytes=_SPILLS.get((head_dim, masked), 0),
        spill_reason=_SPILL_REASON,
    )


_ATTENTION = {key: attention_variant(*key, tile) for key, tile in TILES.items()}
VARIANTS = tuple(_ATTENTION.values())


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale Q K^T + mask) V`` in INT8: [B, Hq, Nq, D], token-major in memory.

    q: [B, Hq, Nq, D]; k, v: [B, Hk, Nk, D], all fp16, bf16 or fp32, D up to 256. mask: None, bool
    (True = attend) or additive, [B|1, Hq|1, Nq|1, Nk|1]. return_lse: also the logarithm of the sum
    of each row's exponentiated scores, FP32 [B, Hq, Nq].
    """
    if causal and k.shape[2] > q.shape[2]:  # the keys after these are seen by no query
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
        mask = None if mask is None else mask[..., : q.shape[2]]
    if mask is not None:
        mask = mask.float() if mask.dtype == torch.float64 else mask
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    channels = q.shape[3]
    q, k, v, layout = readable(q, k, v)
    live_keys = None if mask is None else _live_keys(mask, causal, q, k)
    packed = quantise(q, k, v, layout, live_keys=live_keys, scale=scale)
    # empty_like saves the time that a transposed view takes to make.
    out = torch.empty_like(q) if layout.token_major else _token_major_like(q)
    lse = None
    if return_lse:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _launch_attention(packed, q, k, mask, causal, out, lse)
    if out.shape[3] != channels:
        out = out.transpose(1, 2)[..., :channels].contiguous().transpose(1, 2)
    if not return_lse:
        return out
    # Smoothing took scale * q . mean(K) from every score of a row.
    key_mean = packed.key_mean(k).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return out, lse + (q.float() * key_mean).sum(-1) * scale


def _token_major_like(q: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, channels = q.shape
    return q.new_empty((batch, tokens, heads, channels)).transpose(1, 2)


def _launch_attention(
    packed: Packed,
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Enqueue the attention kernel on quantised operands.

    Writes ``out`` [B, Hq, Nq, D], token-major, and if given ``lse`` [B, Hq, Nq].
    """
    layout = packed.layout
    start = packed.buffer.data_ptr()
    key = layout.head_dim, mask is not None
    batch, q_heads, q_len, channels = q.shape
    row_blocks = -(-q_len // TILES[key].rows)
    launch(
        _ATTENTION[key],
        q.get_device(),
        row_blocks * q_heads * batch,
        start + layout.q_codes,
        start + layout.q_scales,
        start + layout.k_codes,
        start + layout.v_codes,
        start + layout.k_scales,
        start + layout.v_channels,
        *(_NO_MASK if mask is None else _mask_view(mask)),
        out.data_ptr(),
        *layout.out_view,
        0 if lse is None else lse.data_ptr(),
        q_heads,
        k.shape[1],
        q_len,
        k.shape[2],
        channels,
        layout.blocks,
        causal,
        _CODES[out.dtype],
    )


def _mask_view(mask: torch.Tensor) -> tuple[int, ...]:
    """C++'s ``Mask`` of ``mask`` [B, Hq, Nq, Nk], expanded."""
    strides = mask.stride()
    in_fours = strides[3] == 1 and all(
        offset % 4 == 0 for offset in (mask.data_ptr() // mask.itemsize, *strides[:3])
    )
    return mask.data_ptr(), *strides, _CODES[mask.dtype], in_fours


def _live_keys(mask: torch.Tensor, causal: bool, q, k) -> torch.Tensor | None:
    """Keys that some query sees, bool [B|1, Hk|1, Nk] with contiguous rows; None if all are.

    The others take no part in means and scales, so that whatever padding holds cannot matter.
    """
    mask = without_expanded_dims(mask)
    mask = mask.unflatten(1, (k.shape[1], -1) if mask.shape[1] > 1 else (1, 1))
    live = Visibility(mask, causal, q.shape[2], k.shape[2]).live_keys(k.device)
    live = live[:, :, 0, :, 0]
    return live if live.stride(-1) == 1 else live.contiguous()


def _forward(q, k, v, *, precision: str, mask, scale: float, causal: bool) -> torch.Tensor:
    if not q.dtype == k.dtype == v.dtype:  # FP32 holds what any of them may, FP16 does not
        out = attend(q.float(), k.float(), v.float(), mask=mask, scale=scale, causal=causal)
        return out.to(q.dtype)
    return attend(q, k, v, mask=mask, scale=scale, causal=causal)


SM80_INT8 = Backend(
    name="sm80_int8",
    precisions=("int8",),
    native=True,
    constraints=(
        Capability((8, 0), (12, 1)),
        Dtypes((torch.float16, torch.bfloat16, torch.float32)),
        HeadDimUpTo(256),
    ),
    forward=_forward,
)
