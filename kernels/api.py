"""Quantised attention for torch: the one bridge between the kernels and everything above them."""

import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from . import backends
from .dispatch import Decision, choose, objection_of, refuse
from .precision import PRECISIONS
from .request import describe_request, everyday_request, find_fault, needs_grad


class UnsupportedAttentionError(ValueError):
    """No backend can compute this call right; the message says what is wrong and what to do."""


class Capability(NamedTuple):
    """Whether ``backend`` can compute ``precision`` on the device that was asked about."""

    precision: str
    backend: str
    native: bool
    usable: bool
    reason: str  # why not; empty if usable


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    precision: str,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    trainable: bool = False,
    backend: str | None = None,
    emulation: bool = True,
) -> Decision:
    """Say which backend would compute this call, or why none can. Reads no data of the call.

    A native backend builds and proves itself here, on the first call of each kind.

    Arguments as in :func:`attention`. ``trainable`` asks about :func:`attention_trainable`;
    ``emulation=False`` leaves out backends slower than the host's own attention.
    """
    options = precision, causal, trainable, backend, emulation
    signature = _signature(q, k, v, mask, options)
    return _settled.get(signature) or _decide(q, k, v, mask, options, signature)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    precision: str,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """``softmax(scale Q K^T + mask) V`` in ``precision``, forward only.

    q: [B, Hq, Nq, D]; k, v: [B, Hk, Nk, D], Hq a multiple of Hk; fp16, bf16, fp32 or fp64, any
    strides. mask: bool (True = attend) or additive, broadcastable to [B, Hq, Nq, Nk]; a row with
    nothing to attend to gives zeros. scale: D ** -0.5 if None. causal: key j is seen by query i
    where j <= i, as in torch's scaled_dot_product_attention.

    Returns [B, Hq, Nq, D] in q's dtype, token-major in memory: ``out.transpose(1, 2)`` is
    contiguous, so the [B, N, H*D] that most models want next costs no copy.

    Raises UnsupportedAttentionError if no backend can compute the call, or if a gradient is
    needed (use :func:`attention_trainable`).
    """
    options = precision, causal, False, backend, True
    signature = _signature(q, k, v, mask, options)
    compute = _prepared.get(signature) or _prepare(q, k, v, mask, options, signature)
    scale = operator.index(q.shape[-1]) ** -0.5 if scale is None else float(scale)
    return compute(q, k, v, mask=_as_4d(mask), scale=scale)


def attention_trainable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention whose forward and backward run in INT8 (SageBwd: paper, section 4).

    Arguments and result as in :func:`attention`; gradients reach q, k and v in their own dtypes.
    Raises UnsupportedAttentionError if no backend can compute the call.
    """
    decision = explain(
        q, k, v, precision="int8", mask=mask, causal=causal, trainable=True, backend=backend
    )
    if decision.backend is None:
        raise UnsupportedAttentionError(decision.reason)
    scale = operator.index(q.shape[-1]) ** -0.5 if scale is None else float(scale)
    train = backends.named(decision.backend).train
    return train(q, k, v, mask=_as_4d(mask), scale=scale, causal=causal)


def capabilities(device: torch.device | str) -> list[Capability]:
    """Every backend and precision on ``device``, for an everyday call that needs no gradient."""
    device = torch.device(device)
    rows = []
    for precision in PRECISIONS:
        request = everyday_request(precision, device)
        for backend in backends.BACKENDS:
            if precision in backend.precisions and backend.forward is not None:
                reason = objection_of(backend, request) or ""
                rows.append(Capability(precision, backend.name, backend.native, not reason, reason))
    return rows


# Decisions for a native backend, which stay as they are once its self-test has passed, and how it
# computes such calls. A model makes the same few kinds of calls thousands of times; to decide anew
# took as long as to launch.
_settled: dict[tuple, Decision] = {}
_prepared: dict[tuple, Callable[..., torch.Tensor]] = {}
_MOST_REMEMBERED = 4096  # of each


def _signature(q, k, v, mask, options: tuple) -> tuple | None:
    """Everything about a call but addresses and the scale.

    None where it may not be remembered: tracers look on, or a tensor is no plain one.
    """
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is torch.Tensor:
        return None
    if not q.layout is k.layout is v.layout is torch.strided:
        return None
    if mask is not None:
        if type(mask) is not torch.Tensor or mask.requires_grad:
            return None
        options = *options, mask.shape, mask.dtype, mask.device
    return (
        q.shape,
        q.stride(),
        q.dtype,
        q.device,
        k.shape,
        k.stride(),
        k.dtype,
        k.device,
        v.shape,
        v.stride(),
        v.dtype,
        v.device,
        needs_grad(q, k, v),
        options,
    )


def _decide(q, k, v, mask, options: tuple, signature: tuple | None) -> Decision:
    """Decide on a call of this ``signature`` and remember what stays true."""
    precision, causal, trainable, backend, emulation = options
    fault = find_fault(q, k, v, precision=precision, mask=mask)
    if fault:
        return refuse(fault)
    request = describe_request(
        q, k, v, precision=precision, mask=mask, causal=causal, trainable=trainable
    )
    if trainable and mask is not None and mask.requires_grad:
        return refuse("the mask needs a gradient, which SageBwd does not give")
    decision = choose(request, backend=backend, emulation=emulation)
    if decision.native and signature:
        _remember(_settled, signature, decision)
    return decision


def _prepare(q, k, v, mask, options: tuple, signature: tuple | None) -> Callable[..., torch.Tensor]:
    """What computes calls of this ``signature``: ``(q, k, v, *, mask, scale) -> out``."""
    precision, causal, *_ = options
    decision = _settled.get(signature) or _decide(q, k, v, mask, options, signature)
    if decision.backend is None:
        raise UnsupportedAttentionError(decision.reason)
    if signature is None:
        # Calling the operator costs 15 us more than calling what it does; only tracers need it.
        return partial(_operator, causal=causal, precision=precision, backend=decision.backend)
    backend = backends.named(decision.backend)
    compute = None
    if backend.prepare is not None and mask is None:
        compute = backend.prepare(q, k, v, causal=causal)
    if compute is None:
        compute = partial(backend.forward, precision=precision, causal=causal)
    if decision.native:
        _remember(_prepared, signature, compute)
    return compute


def _remember(memory: dict, signature: tuple, answer) -> None:
    if len(memory) >= _MOST_REMEMBERED:
        memory.clear()
    memory[signature] = answer


def _as_4d(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask[(None,) * (4 - mask.ndim)]


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    precision: str,
    backend: str,
) -> torch.Tensor:
    return backends.named(backend).forward(
        q, k, v, precision=precision, mask=mask, scale=scale, causal=causal
    )


# An operator of its own so that torch.compile sees one opaque node instead of the emulation's
# hundreds, and so that native launchers need no tracing rules. torch has one table of operators per
# process: a second copy of the pack would take the first one's place in it, and torch 2.13 crashes.
if hasattr(torch.ops.sageattention3, "attention"):
    raise ImportError(
        "SageAttention3 is loaded already, from another folder: remove one of the two copies from "
        f"custom_nodes (this one is {Path(__file__).resolve().parents[1]}) and restart ComfyUI"
    )
_operator = torch.library.custom_op("sageattention3::attention", _attention, mutates_args=())


@_operator.register_fake
def _(q, k, v, mask, scale, causal, precision, backend):
    b, h, n, d = q.shape
    return q.new_empty((b, n, h, d)).transpose(1, 2)
