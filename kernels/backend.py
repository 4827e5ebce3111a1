"""What a backend is: one way to compute some precisions, and the calls it declares itself fit for.

A new kernel family slots in as one launcher file that builds a ``Backend`` and one line in
``kernels/backends.py``; dispatch reads nothing but these declarations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from .request import Request


class Constraint(Protocol):
    """A condition on a request that can say itself in words, for the report a creator reads."""

    def admits(self, request: Request) -> bool: ...

    def describe(self) -> str:
        """The condition as the rest of a sentence that begins with "needs"."""
        ...


@dataclass(frozen=True)
class OnDevice:
    """The tensors lie on one of these device types."""

    types: tuple[str, ...]

    def admits(self, request: Request) -> bool:
        return request.device in self.types

    def describe(self) -> str:
        return f"tensors on {' or '.join(self.types)}"


@dataclass(frozen=True)
class HeadDimUpTo:
    """head_dim of at most ``limit`` channels."""

    limit: int

    def admits(self, request: Request) -> bool:
        return request.head_dim <= self.limit

    def describe(self) -> str:
        return f"a head_dim of at most {self.limit}"


@dataclass(frozen=True)
class HeadDimIn:
    """head_dim of first to last channels, in one of ``ranges``."""

    ranges: tuple[tuple[int, int], ...]

    def admits(self, request: Request) -> bool:
        return any(first <= request.head_dim <= last for first, last in self.ranges)

    def describe(self) -> str:
        return "a head_dim of " + " or ".join(f"{first} to {last}" for first, last in self.ranges)


@dataclass(frozen=True)
class Unmasked:
    """No mask; the call may be causal."""

    def admits(self, request: Request) -> bool:
        return request.mask == "none"

    def describe(self) -> str:
        return "a call without a mask"


@dataclass(frozen=True)
class NotCausal:
    """Every query may see every key."""

    def admits(self, request: Request) -> bool:
        return not request.causal

    def describe(self) -> str:
        return "a call that is not causal"


@dataclass(frozen=True)
class TokensFrom:
    """At least ``least`` queries, and as many keys."""

    least: int

    def admits(self, request: Request) -> bool:
        return min(request.q_len, request.kv_len) >= self.least

    def describe(self) -> str:
        return f"at least {self.least} tokens"


@dataclass(frozen=True)
class Capability:
    """An NVIDIA GPU of compute capability ``first`` to ``last``, both (major, minor)."""

    first: tuple[int, int]
    last: tuple[int, int]

    def admits(self, request: Request) -> bool:
        return request.capability is not None and self.first <= request.capability <= self.last

    def describe(self) -> str:
        first, last = (".".join(map(str, version)) for version in (self.first, self.last))
        return f"an NVIDIA GPU of compute capability {first} to {last}"


@dataclass(frozen=True)
class Dtypes:
    """q has one of these dtypes."""

    dtypes: tuple[torch.dtype, ...]

    def admits(self, request: Request) -> bool:
        return request.dtype in self.dtypes

    def describe(self) -> str:
        return " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)


@dataclass(frozen=True)
class OneDtype:
    """k and v have q's dtype."""

    def admits(self, request: Request) -> bool:
        return not request.mixed_dtypes

    def describe(self) -> str:
        return "q, k and v of one dtype"


@dataclass(frozen=True)
class Backend:
    """One way to compute ``precisions``.

    forward: ``(q, k, v, *, precision, mask, scale, causal) -> out`` on [B, H, N, D] tensors; out is
        token-major in memory. None if it serves training alone.
    train: the differentiable INT8 form (SageBwd), same arguments without precision; None if absent.
    prepare: ``(q, k, v, *, causal) -> ((q, k, v, *, mask, scale) -> out)``, ``forward`` for calls
        without a mask whose tensors have the same sizes, strides and dtypes, faster as it has
        worked out what depends on those; None, or an answer of None, if it is no faster.
    native: False marks an emulation, which is slower than the host's own attention.
    proof: ``(device, head_dim, dtype) -> clause or None``, what a native backend must show beside
        the self-test's calls; None if nothing.
    unasked: what a call must be, beside ``constraints``, for dispatch to take this backend although
        nobody named it: that for which it is faster than the host's own attention, say. None: it
        answers only to its name.
    """

    name: str
    precisions: tuple[str, ...]
    native: bool
    constraints: tuple[Constraint, ...]
    forward: Callable[..., torch.Tensor] | None
    train: Callable[..., torch.Tensor] | None = None
    prepare: Callable[..., Callable[..., torch.Tensor] | None] | None = None
    proof: Callable[[torch.device, int, torch.dtype], str | None] | None = None
    unasked: tuple[Constraint, ...] | None = ()

    def volunteers(self, request: Request) -> bool:
        """Whether dispatch considers it for calls like this where nobody named a backend."""
        wanted = self.train if request.trainable else self.forward
        return (
            self.unasked is not None and wanted is not None and request.precision in self.precisions
        )

    def objection(self, request: Request) -> str | None:
        """Why this backend cannot serve ``request``, as a clause; None if it can."""
        if request.precision not in self.precisions:
            return f"{self.name} does not compute {request.precision}"
        if request.trainable and self.train is None:
            return f"{self.name} has no backward pass"
        if not request.trainable and self.forward is None:
            return f"{self.name} serves training alone"
        for constraint in self.constraints:
            if not constraint.admits(request):
                return f"{self.name} needs {constraint.describe()}"
        return None

    def doubt(self, request: Request) -> str | None:
        """Why dispatch leaves this backend out although it can serve ``request``, as a clause."""
        for constraint in self.unasked or ():
            if not constraint.admits(request):
                gain = "to be faster than the host's attention"
                return f"{self.name} needs {constraint.describe()} {gain}"
        return None


def token_major_like(q: torch.Tensor) -> torch.Tensor:
    """Memory for a backend's output: as q [B, H, N, D], token-major."""
    batch, heads, tokens, channels = q.shape
    return q.new_empty((batch, tokens, heads, channels)).transpose(1, 2)
