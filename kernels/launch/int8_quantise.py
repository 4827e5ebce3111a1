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


class Packed(NamedTuple):
    """Q, K and V as the attention kernel reads them: one buffer, and its parts' addresses."""

    buffer: torch.Tensor  # uint8; keeps the parts alive
    head_dim: int  # one of HEAD_DIMS
    blocks: int  # of K and V per (batch, key head)
    chunks: int  # of tokens that the statistics were made of
    q_codes: int
    q_scales: int
    k_codes: int
    v_codes: int
    k_scales: int
    v_channels: int
    partials: int

    def key_mean(self, k: torch.Tensor) -> torch.Tensor:
        """What smoothing took from K [B, Hk, Nk, D]: its mean over live tokens, [B, Hk, 1, D]."""
        batch, heads, tokens, channels = k.shape
        width = _partial_floats(self.head_dim)
        start = self.partials - self.buffer.data_ptr()
        size = batch * heads * 2 * self.chunks * width * 4
        partials = self.buffer[start : start + size].view(torch.float32)
        partials = partials.view(batch, heads, 2, self.chunks, width)[:, :, 0].sum(2, keepdim=True)
        count = partials[..., 3 * self.head_dim, None].clamp_min(1)
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
    kv_heads, kv_len = k.shape[1:3]
    head_dim = padded_head_dim(channels)
    blocks = 2 * _blocks(kv_len, 2 * _BLOCK_KEYS)
    chunks, chunk_tokens = _chunks(batch * kv_heads * 2, kv_len, q.device.index)
    kv_bytes = batch * kv_heads * blocks * _BLOCK_KEYS * head_dim
    reduction_blocks = batch * kv_heads * 2 * chunks
    packed = _allocate(
        q.device,
        head_dim,
        blocks,
        chunks,
        q_codes=batch * q_heads * q_len * head_dim,
        q_scales=batch * q_heads * q_len * 4,
        k_codes=kv_bytes,
        v_codes=kv_bytes,
        k_scales=batch * kv_heads * blocks * 16,
        v_channels=batch * kv_heads * 2 * head_dim * 4,
        partials=reduction_blocks * _partial_floats(head_dim) * 4,
    )
    q_view, k_view, v_view, live_view = _view(q), _view(k), _view(v), _live_view(live_keys)
    q_blocks = _blocks(q_len, _Q_TOKENS)
    launch(
        _PROLOGUE[head_dim, q.dtype],
        q.device.index,
        (reduction_blocks + batch * q_heads * q_blocks, 1, 1),
        *q_view,
        *k_view,
        *v_view,
        *live_view,
        packed.q_codes,
        packed.q_scales,
        packed.partials,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        channels,
        chunks,
        chunk_tokens,
        reduction_blocks,
        q_blocks,
        scale * math.log2(math.e),
    )
    launch(
        _PACK[head_dim, q.dtype],
        q.device.index,
        (blocks * 2 * kv_heads * batch, 1, 1),
        *k_view,
        *v_view,
        *live_view,
        packed.partials,
        packed.k_codes,
        packed.v_codes,
        packed.k_scales,
        packed.v_channels,
        kv_heads,
        kv_len,
        channels,
        chunks,
        blocks,
    )
    return packed


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` [B, H, N, D] as the kernels can read it: copied only if its memory forbids vectors.

    That is where channels are strided or not a multiple of 8 (then zeros fill them up), or where
    a token does not start on 16 bytes.
    """
    if x.shape[-1] % 8:
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
    per_vector = _VECTOR_BYTES // x.itemsize
    aligned = x.data_ptr() % _VECTOR_BYTES == 0 and all(
        size == 1 or stride % per_vector == 0
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )
    return x if aligned and x.stride(-1) == 1 else x.contiguous()


def padded_head_dim(channels: int) -> int:
    return next(d for d in HEAD_DIMS if d >= channels)


def _allocate(device: torch.device, head_dim, blocks, chunks, **sizes: int) -> Packed:
    """One allocation for all parts: an allocator call costs microseconds."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8, device=device)
    start = buffer.data_ptr()
    addresses = {name: start + offset for name, offset in offsets.items()}
    return Packed(buffer, head_dim, blocks, chunks, **addresses)


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
    return x.data_ptr(), *x.stride()[:3]


def _live_view(live: torch.Tensor | None) -> tuple[int, int, int]:
    if live is None:
        return 0, 0, 0
    strides = (0 if size == 1 else s for size, s in zip(live.shape, live.stride(), strict=True))
    batch_stride, head_stride, _ = strides
    return live.data_ptr(), batch_stride, head_stride
