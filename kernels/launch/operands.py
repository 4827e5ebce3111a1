"""What every launcher does with a call's tensors, before and after its kernels.

Structs and enumerators named here are those of kernels/cuda.
"""

import math
from collections.abc import Callable

import torch

from ..backend import Dtypes, HeadDimUpTo
from ..reference.visibility import Visibility, without_expanded_dims
from .geometry import HEAD_DIMS

# As struct formats, for the parameters of variants.
TENSOR, LIVE_KEYS, MASK, OUTPUT = "Qqqq", "Qqq", "Qqqqqii", "Qqqq"

DTYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}  # enum Dtype
CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.bool: 3}  # its values
CONSTRAINTS = (Dtypes(tuple(DTYPES)), HeadDimUpTo(HEAD_DIMS[-1]))
VECTOR_BYTES = 16
LOG2_E = math.log2(math.e)

_NO_MASK = (0,) * len(MASK)


# ------------------------------------------------------------------------------------ before a call
def in_reach(
    k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """k, v and mask without the keys that no query of a causal call sees; the mask expanded."""
    if causal and k.shape[2] > q.shape[2]:
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
        mask = None if mask is None else mask[..., : q.shape[2]]
    if mask is not None:
        mask = mask.float() if mask.dtype == torch.float64 else mask
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return k, v, mask


def in_vectors(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> bool:
    """Whether every token of [B, H, N, D] starts on 16 bytes if the first one does."""
    per_vector = VECTOR_BYTES // itemsize
    steps = zip(shape[:-1], stride[:-1], strict=True)
    return (
        shape[-1] % 8 == 0
        and stride[-1] == 1
        and all(size == 1 or step % per_vector == 0 for size, step in steps)
    )


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether the first token of each starts on 16 bytes."""
    for x in tensors:  # noqa: SIM110 - a generator would take a microsecond of every call
        if x.data_ptr() % VECTOR_BYTES:
            return False
    return True


def readable(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """``tensors`` [B, H, N, D] as kernels read them, copied only if their memory forbids vectors.

    That is where channels are strided or not a multiple of 8 (then zeros fill them up), or where a
    token does not start on 16 bytes.
    """
    return [_readable(x) for x in tensors]


def _readable(x: torch.Tensor) -> torch.Tensor:
    if in_vectors(x.shape, x.stride(), x.itemsize) and aligned(x):
        return x
    if x.shape[-1] % 8:
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
    # contiguous() would give a tensor back that only starts unaligned.
    return x.clone(memory_format=torch.contiguous_format)


def find_live_keys(
    mask: torch.Tensor | None, causal: bool, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor | None:
    """Keys that some query sees, bool [B|1, Hk|1, Nk] with contiguous rows; None if all are.

    The others take no part in means and scales, so that whatever padding holds cannot matter.
    """
    if mask is None:
        return None
    mask = without_expanded_dims(mask)
    mask = mask.unflatten(1, (k.shape[1], -1) if mask.shape[1] > 1 else (1, 1))
    live = Visibility(mask, causal, q.shape[2], k.shape[2]).live_keys(k.device)
    live = live[:, :, 0, :, 0]
    return live if live.stride(-1) == 1 else live.contiguous()


# ------------------------------------------------------------------------------------ as parameters
def view(x: torch.Tensor) -> tuple[int, int, int, int]:
    """C++'s ``Tensor`` or ``Output`` of ``x`` [B, H, N, D]."""
    return x.data_ptr(), *x.stride()[:3]


def live_view(live: torch.Tensor | None) -> tuple[int, int, int]:
    """C++'s ``LiveKeys`` of ``live`` [B|1, Hk|1, Nk]; None: all are."""
    if live is None:
        return 0, 0, 0
    strides = (0 if size == 1 else s for size, s in zip(live.shape, live.stride(), strict=True))
    batch_stride, head_stride, _ = strides
    return live.data_ptr(), batch_stride, head_stride


def mask_view(mask: torch.Tensor | None) -> tuple[int, ...]:
    """C++'s ``Mask`` of ``mask`` [B, Hq, Nq, Nk], expanded."""
    if mask is None:
        return _NO_MASK
    strides = mask.stride()
    in_fours = strides[3] == 1 and all(
        offset % 4 == 0 for offset in (mask.data_ptr() // mask.itemsize, *strides[:3])
    )
    return mask.data_ptr(), *strides, CODES[mask.dtype], in_fours


# ------------------------------------------------------------------------------------- after a call
def first_channels(out: torch.Tensor, channels: int) -> torch.Tensor:
    """``out`` [B, H, N, D], token-major, without the channels that :func:`readable` added."""
    if out.shape[3] == channels:
        return out
    return out.transpose(1, 2)[..., :channels].contiguous().transpose(1, 2)


def with_all_keys(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``gradient`` with zeros for the keys of ``x`` that no query of a causal call sees."""
    missing = x.shape[2] - gradient.shape[2]
    return torch.nn.functional.pad(gradient, (0, 0, 0, missing)) if missing else gradient


def true_lse(
    lse: torch.Tensor, q: torch.Tensor, key_mean: torch.Tensor, scale: float
) -> torch.Tensor:
    """``lse`` [B, Hq, Nq] of smoothed K with scale * q . mean(K) back; key_mean [B, Hk, 1, D]."""
    key_mean = key_mean.repeat_interleave(q.shape[1] // key_mean.shape[1], 1)
    return lse + (q.float() * key_mean).sum(-1) * scale


def in_one_dtype(attend: Callable[..., torch.Tensor], **fixed) -> Callable[..., torch.Tensor]:
    """``Backend.forward`` by ``attend``: q's dtype, whatever k and v have. fixed: more options."""

    def forward(q, k, v, *, precision: str, mask, scale: float, causal: bool) -> torch.Tensor:
        if q.dtype == k.dtype == v.dtype:
            return attend(q, k, v, mask=mask, scale=scale, causal=causal, **fixed)
        # FP32 holds what any of them may, FP16 does not.
        q32, k32, v32 = q.float(), k.float(), v.float()
        return attend(q32, k32, v32, mask=mask, scale=scale, causal=causal, **fixed).to(q.dtype)

    return forward
