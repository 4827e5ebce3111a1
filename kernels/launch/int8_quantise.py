"""Q, K and V to INT8 in two launches: one reads all three and reduces, one writes K and V.

Layouts: kernels/cuda/int8_layout.cuh; statistics: kernels/cuda/kv_statistics.cuh.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ..jit.loader import launch
from ..jit.variants import Variant

HEAD_DIMS = (64, 96, 128, 256)  # others are padded to the next
DTYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}  # enum Dtype

_TENSOR, _LIVE_KEYS = "Qqqq", "Qqq"
_PROLOGUE_THREADS = 256
_PACK_THREADS = 128
_Q_TOKENS = 128  # per block of the prologue
_BLOCK_KEYS = 64  # of the layout; the attention kernel may take two at a time
_MOST_CHUNKS = 32  # every block of the packing kernel reads what all of them left
_SMALLEST_CHUNK = 256  # tokens
_WAVES = 2  # of blocks that reduce
_ALIGNMENT = 256  # bytes, of the parts of the buffer
_VECTOR_BYTES = 16
LOG2_E = math.log2(math.e)


def _prologue(head_dim: int, dtype: torch.dtype) -> Variant:
    return Variant(
        source="sm80_int8_prologue.cu",
        kernel="sm80_int8_prologue",
        template=(head_dim, DTYPES[dtype]),
        params=f"{_TENSOR * 3}{_LIVE_KEYS}3Q9if",
        threads=_PROLOGUE_THREADS,
        min_blocks=3 if head_dim <= 128 and dtype.itemsize == 2 else 2,
    )


def _pack(head_dim: int, dtype: torch.dtype) -> Variant:
    return Variant(
        source="sm80_int8_pack.cu",
        kernel="sm80_int8_pack",
        template=(head_dim, DTYPES[dtype]),
        params=f"{_TENSOR * 2}{_LIVE_KEYS}5Q5i",
        threads=_PACK_THREADS,
        min_blocks=5 if head_dim * dtype.itemsize <= 256 else 2,
    )


_PROLOGUE = {(d, t): _prologue(d, t) for d in HEAD_DIMS for t in DTYPES}
_PACK = {(d, t): _pack(d, t) for d in HEAD_DIMS for t in DTYPES}
VARIANTS = (*_PROLOGUE.values(), *_PACK.values())


class Layout(NamedTuple):
    """How a call is cut up, and where its parts lie in one buffer: offsets in bytes."""

    head_dim: int  # one of HEAD_DIMS
    blocks: int  # of K and V per (batch, key head)
    chunks: int  # of tokens, per (batch, key head) and per K and V, that statistics are made of
    chunk_tokens: int
    reduction_blocks: int
    q_blocks: int  # per (batch, query head)
    prologue_grid: tuple[int, int, int]
    pack_grid: tuple[int, int, int]
    q_codes: int
    q_scales: int
    k_codes: int
    v_codes: int
    k_scales: int
    v_channels: int
    partials: int
    bytes: int


class Packed(NamedTuple):
    """Q, K and V as the attention kernel reads them."""

    buffer: torch.Tensor  # uint8
    layout: Layout

    def key_mean(self, k: torch.Tensor) -> torch.Tensor:
        """What smoothing took from K [B, Hk, Nk, D]: its mean over live tokens, [B, Hk, 1, D]."""
        batch, heads, tokens, channels = k.shape
        _, _, chunks, *_ = layout = self.layout
        width = _partial_floats(layout.head_dim)
        partials = self.buffer[layout.partials :][: batch * heads * 2 * chunks * width * 4]
        partials = partials.view(torch.float32).view(batch, heads, 2, chunks, width)
        partials = partials[:, :, 0].sum(2, keepdim=True)
        count = partials[..., 3 * layout.head_dim, None].clamp_min(1)
        return partials[..., :channels] * (256 * tokens / count)  # 1 / RANGE, see rows.cuh


def quantise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    live_keys: torch.Tensor | None,
    scale: float,
) -> Packed:
    """Smooth K and V, rotate Q and K, quantise all three. Enqueues two kernels, never syncs.

    q [B, Hq, Nq, D], k, v [B, Hk, Nk, D] as :func:`readable` gives them. live_keys: bool
    [B|1, Hk|1, Nk], contiguous in the last dimension: keys that some query sees; None: all.
    scale: of the softmax.
    """
    batch, q_heads, q_len, channels = q.shape
    _, kv_heads, kv_len, _ = k.shape
    device = q.device.index
    layout = _lay_out(batch, q_heads, kv_heads, q_len, kv_len, channels, device)
    buffer = torch.empty(layout.bytes, dtype=torch.uint8, device=q.device)
    start = buffer.data_ptr()
    key = layout.head_dim, q.dtype
    kv_view = (*_view(k), *_view(v), *_live_view(live_keys))
    launch(
        _PROLOGUE[key],
        device,
        layout.prologue_grid,
        *_view(q),
        *kv_view,
        start + layout.q_codes,
        start + layout.q_scales,
        start + layout.partials,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        channels,
        layout.chunks,
        layout.chunk_tokens,
        layout.reduction_blocks,
        layout.q_blocks,
        scale * LOG2_E,
    )
    launch(
        _PACK[key],
        device,
        layout.pack_grid,
        *kv_view,
        start + layout.partials,
        start + layout.k_codes,
        start + layout.v_codes,
        start + layout.k_scales,
        start + layout.v_channels,
        kv_heads,
        kv_len,
        channels,
        layout.chunks,
        layout.blocks,
    )
    return Packed(buffer, layout)


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` [B, H, N, D] as the kernels can read it: copied only if its memory forbids vectors.

    That is where channels are strided or not a multiple of 8 (then zeros fill them up), or where
    a token does not start on 16 bytes.
    """
    if x.shape[-1] % 8:
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
    aligned = x.data_ptr() % _VECTOR_BYTES == 0
    return x if aligned and _are_vectors(x.shape, x.stride(), x.itemsize) else x.contiguous()


@lru_cache(maxsize=4096)
def _are_vectors(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> bool:
    """Whether every token starts on 16 bytes if the first one does."""
    per_vector = _VECTOR_BYTES // itemsize
    steps = zip(shape[:-1], stride[:-1], strict=True)
    return stride[-1] == 1 and all(size == 1 or step % per_vector == 0 for size, step in steps)


def padded_head_dim(channels: int) -> int:
    return next(d for d in HEAD_DIMS if d >= channels)


@lru_cache(maxsize=4096)
def _lay_out(
    batch: int, q_heads: int, kv_heads: int, q_len: int, kv_len: int, channels: int, device: int
) -> Layout:
    """One buffer for all parts: an allocation costs microseconds, and so would this arithmetic."""
    head_dim = padded_head_dim(channels)
    blocks = 2 * _blocks(kv_len, 2 * _BLOCK_KEYS)
    chunks, chunk_tokens = _chunks(batch * kv_heads * 2, kv_len, device)
    reduction_blocks = batch * kv_heads * 2 * chunks
    q_blocks = _blocks(q_len, _Q_TOKENS)
    kv_bytes = batch * kv_heads * blocks * _BLOCK_KEYS * head_dim
    sizes = {
        "q_codes": batch * q_heads * q_len * head_dim,
        "q_scales": batch * q_heads * q_len * 4,
        "k_codes": kv_bytes,
        "v_codes": kv_bytes,
        "k_scales": batch * kv_heads * blocks * 16,
        "v_channels": batch * kv_heads * 2 * head_dim * 4,
        "partials": reduction_blocks * _partial_floats(head_dim) * 4,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += _blocks(size, _ALIGNMENT) * _ALIGNMENT
    return Layout(
        head_dim=head_dim,
        blocks=blocks,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        reduction_blocks=reduction_blocks,
        q_blocks=q_blocks,
        prologue_grid=(reduction_blocks + batch * q_heads * q_blocks, 1, 1),
        pack_grid=(blocks * 2 * kv_heads * batch, 1, 1),
        bytes=end,
        **offsets,
    )


def _chunks(reductions: int, tokens: int, device: int) -> tuple[int, int]:
    """Into how many chunks of how many tokens each of ``reductions`` tensors is cut."""
    wanted = -(-_WAVES * 2 * _multiprocessors(device) // reductions)
    chunks = max(1, min(wanted, _MOST_CHUNKS, tokens // _SMALLEST_CHUNK))
    size = _blocks(tokens, chunks)
    return _blocks(tokens, size), size


@lru_cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _blocks(tokens: int, block: int) -> int:
    return -(-tokens // block)


def _partial_floats(head_dim: int) -> int:
    return 3 * head_dim + 4


def _view(x: torch.Tensor) -> tuple[int, int, int, int]:
    batch, head, token, _ = x.stride()
    return x.data_ptr(), batch, head, token


def _live_view(live: torch.Tensor | None) -> tuple[int, int, int]:
    if live is None:
        return 0, 0, 0
    strides = (0 if size == 1 else s for size, s in zip(live.shape, live.stride(), strict=True))
    batch_stride, head_stride, _ = strides
    return live.data_ptr(), batch_stride, head_stride
