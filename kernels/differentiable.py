"""Two passes that save nothing but their tensors, as one function that torch can differentiate."""

from typing import NamedTuple, Protocol

import torch


class Call(NamedTuple):
    """What both passes are told besides tensors."""

    scale: float  # of the softmax
    causal: bool


class Passes(Protocol):
    """One way to compute attention and its gradients; arguments as in ``attention``."""

    def forward(self, q, k, v, mask, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the log-sum-exp of each row in whatever form ``backward`` reads it."""
        ...

    def backward(self, d_out, q, k, v, mask, out, lse, call: Call) -> tuple[torch.Tensor, ...]:
        """dQ, dK and dV in the dtypes of q, k and v."""
        ...


def differentiable(
    passes: Passes,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """Attention by ``passes``, with gradients for q, k and v.

    Raises ValueError if the mask requires a gradient (it gets none), RuntimeError in a backward
    pass with create_graph.
    """
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("SageBwd gives no gradient to the mask: pass mask.detach()")
    return _Differentiable.apply(q, k, v, mask, passes, Call(scale, causal))


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, passes, call):
        with torch.autocast(q.device.type, enabled=False):
            out, lse = passes.forward(q, k, v, mask, call)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.passes, ctx.call = passes, call
        return out

    @staticmethod
    def backward(ctx, d_out):
        if torch.is_grad_enabled():  # that is, under create_graph
            raise RuntimeError(
                "SageBwd has no second derivative: differentiate without create_graph, "
                "or leave this attention to the host"
            )
        q, k, v, mask, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            gradients = ctx.passes.backward(d_out, q, k, v, mask, out, lse, ctx.call)
        return *gradients, None, None, None
