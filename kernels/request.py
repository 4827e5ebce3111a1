"""One attention call as dispatch sees it: shapes, dtypes and flags, never the data.

Everything here is plain values, so a decision can be made, cached, traced by ``torch.compile`` and
tested without a GPU. Reading tensor data would stall the device and is never needed to decide.
"""

from typing import NamedTuple

import torch

from .precision import PRECISIONS


class Request(NamedTuple):
    """Shapes, dtypes and flags of one call; lengths in tokens, head_dim in channels."""

    precision: str
    device: str  # torch device type: "cpu", "cuda", ...
    device_index: int | None  # of that type
    capability: tuple[int, int] | None  # CUDA compute capability of that device
    dtype: torch.dtype  # of q; the output has it too
    mixed_dtypes: bool  # k or v differ from q
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    mask: str  # "none", "bool" or "additive"
    causal: bool
    needs_grad: bool
    trainable: bool  # the caller asked for the differentiable form


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability of ``device`` itself (not of the current device), None elsewhere."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """True where autograd would record an operation on any of ``tensors``."""
    if not torch.is_grad_enabled():
        return False
    for t in tensors:  # noqa: SIM110 - as in every call, where a generator takes longer
        if t is not None and t.requires_grad:
            return True
    return False


def mask_kind(mask: torch.Tensor | None) -> str:
    if mask is None:
        return "none"
    return "bool" if mask.dtype == torch.bool else "additive"


def describe_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    precision: str,
    mask: torch.Tensor | None,
    causal: bool,
    trainable: bool,
) -> Request:
    """The request for well-formed arguments (``find_fault`` answered None)."""
    return Request(
        precision=precision,
        device=q.device.type,
        device_index=q.device.index,
        capability=compute_capability(q.device),
        dtype=q.dtype,
        mixed_dtypes=not (q.dtype == k.dtype == v.dtype),
        batch=q.shape[0],
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        q_len=q.shape[2],
        kv_len=k.shape[2],
        head_dim=q.shape[3],
        mask=mask_kind(mask),
        causal=causal,
        needs_grad=needs_grad(q, k, v, mask),
        trainable=trainable,
    )


def everyday_request(precision: str, device: torch.device) -> Request:
    """What an image model asks for: self-attention over 4096 tokens, 24 heads of 128, fp16."""
    return Request(
        precision=precision,
        device=device.type,
        device_index=device.index,
        capability=compute_capability(device),
        dtype=torch.float16,
        mixed_dtypes=False,
        batch=1,
        q_heads=24,
        kv_heads=24,
        q_len=4096,
        kv_len=4096,
        head_dim=128,
        mask="none",
        causal=False,
        needs_grad=False,
        trainable=False,
    )


def find_fault(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    precision: str,
    mask: torch.Tensor | None,
) -> str | None:
    """Say in words what makes these arguments no attention call at all; None if they are one."""
    for name, x in (("q", q), ("k", k), ("v", v), *([] if mask is None else [("mask", mask)])):
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
            return f"{name} must be a dense tensor; got {_kind(x)}"
    if precision not in PRECISIONS:
        return f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        return f"q, k, v must be [B, H, N, D]; got {q.ndim}-, {k.ndim}- and {v.ndim}-dimensional"
    if k.shape != v.shape:
        return f"k and v must have one shape; got {list(k.shape)} and {list(v.shape)}"
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return (
            "q and k must agree in batch and head_dim; "
            f"got {list(q.shape)} and {list(k.shape)} as [B, H, N, D]"
        )
    if 0 in q.shape or 0 in k.shape:
        return f"empty attention: q is {list(q.shape)}, k is {list(k.shape)}"
    if q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads: not a multiple"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            return f"{name} is {_short(tensor.dtype)}; needs fp16, bf16, fp32 or fp64"
    if not q.device == k.device == v.device:
        return f"q, k, v are on different devices: {q.device}, {k.device}, {v.device}"
    return None if mask is None else _mask_fault(mask, q, k)


def _mask_fault(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> str | None:
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        return f"mask is {_short(mask.dtype)}; needs bool (True = attend) or a floating bias"
    if mask.device != q.device:
        return f"mask is on {mask.device}, q on {q.device}"
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    sizes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if mask.ndim > 4 or any(have not in (1, want) for have, want in zip(sizes, full, strict=True)):
        return f"mask {list(mask.shape)} does not broadcast to [B, Hq, Nq, Nk] = {list(full)}"
    return None


def _kind(x: object) -> str:
    return f"a {x.layout} one" if isinstance(x, torch.Tensor) else type(x).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
