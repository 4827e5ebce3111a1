"""Declared constraints in; a backend, or the reason why not, out.

The call itself is never tried. Only a native backend's self-test runs here, once per kind of call.
"""

import operator
from typing import NamedTuple

from . import backends, selftest
from .backend import Backend
from .request import Request


class Decision(NamedTuple):
    """``backend`` computes the call; None means that the host's own attention must.

    reason: one clause for the report, e.g. "sm120_fp4 needs compute capability 12.x"; empty when
    a native backend serves the request and there is nothing to explain.
    """

    backend: str | None
    native: bool
    reason: str


def refuse(reason: str) -> Decision:
    return Decision(None, False, reason)


def choose(request: Request, *, backend: str | None = None, emulation: bool = True) -> Decision:
    """The first backend that fits ``request``.

    backend: insist on this one by name. emulation: whether a backend that is slower than the
    host's own attention may answer; the caller who wants speed says False.
    """
    objection = _objection_to_any(request)
    if objection:
        return refuse(objection)
    if backend is None:
        candidates = [b for b in backends.BACKENDS if b.volunteers(request)]
    else:
        candidates = [b for b in backends.BACKENDS if b.name == backend]
    if not candidates:
        known = ", ".join(b.name for b in backends.BACKENDS)
        wanted = f"computes {request.precision}" if backend is None else f"is named {backend!r}"
        return refuse(f"no backend {wanted}; this build has {known}")
    objections = []
    for candidate in candidates:
        objection = None if backend else candidate.doubt(request)
        objection = objection or objection_of(candidate, request)
        if objection is None and not candidate.native and not emulation:
            objection = f"no native {request.precision} kernel fits this call, emulation is off"
        if objection is None:
            return Decision(candidate.name, candidate.native, "; ".join(objections))
        objections.append(objection)
    return refuse("; ".join(objections))


def objection_of(backend: Backend, request: Request) -> str | None:
    """Why ``backend`` cannot serve ``request`` here, as a clause; None if it can."""
    objection = backend.objection(request)
    if objection or not backend.native:
        return objection
    return selftest.fault(
        backend.name,
        request.precision,
        request.device,
        request.device_index,
        # Under torch.compile the number of channels may be a symbol; kernels are built for a value.
        operator.index(request.head_dim),
        request.dtype,
        request.trainable,
    )


def _objection_to_any(request: Request) -> str | None:
    """What rules every backend out, whatever its constraints."""
    if request.precision == "fp16":
        return "fp16 is the host's own attention"
    if request.trainable and request.precision != "int8":
        return f"{request.precision} has no backward pass; int8 trains (SageBwd)"
    if request.needs_grad and not request.trainable:
        return "a gradient is needed and inference kernels would cut it"
    return None
