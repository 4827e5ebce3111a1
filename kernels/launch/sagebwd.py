"""What SageBwd does around its kernels, whichever those are."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..differentiable import Call
from . import int8_quantise
from .int8_quantise import Packed, quantise
from .operands import find_live_keys, first_channels, in_reach, readable, with_all_keys

TRAINED_DTYPES = (torch.float16, torch.bfloat16)
# Training builds its kernels when it first needs them: few installations ever train.
AHEAD_FROM = 1000


class Operands(NamedTuple):
    """A call's tensors as kernels read them, and quantised."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    packed: Packed


class Passes(NamedTuple):
    """``differentiable.Passes`` in INT8.

    attend_smoothed: of ``Int8Attention``. gradients: ``(d_out, out, lse, operands, call)`` to dQ,
    dK and dV, token-major, by tensors as kernels read them.
    """

    attend_smoothed: Callable[..., tuple[torch.Tensor, Packed]]
    gradients: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def forward(self, q, k, v, mask, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        out, _ = self.attend_smoothed(q, k, v, lse, mask=mask, scale=call.scale, causal=call.causal)
        return out, lse

    def backward(self, d_out, q, k, v, mask, out, lse, call: Call) -> tuple[torch.Tensor, ...]:
        operands = _pack(q, k, v, mask, call)
        d_q, d_k, d_v = self.gradients(*readable(d_out, out), lse, operands, call)
        channels = q.shape[3]
        return (
            first_channels(d_q, channels),
            with_all_keys(first_channels(d_k, channels), k),
            with_all_keys(first_channels(d_v, channels), v),
        )


def _pack(q, k, v, mask: torch.Tensor | None, call: Call) -> Operands:
    """Blocks of 64 keys, whatever the forward pass reads: the codes and scales are the same."""
    k, v, mask = in_reach(k, v, mask, call.causal, q)
    q, k, v, layout = int8_quantise.readable(q, k, v)
    live_keys = find_live_keys(mask, call.causal, q, k)
    packed = quantise(q, k, v, layout, live_keys=live_keys, scale=call.scale)
    return Operands(q, k, v, mask, packed)


def untraced(train: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``train``, left out of what torch.compile traces: launches are nothing that it could."""
    # What torch.compiler.disable sets, which would import torch's compiler for it.
    train._torchdynamo_disable = True
    return train
