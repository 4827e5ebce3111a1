"""The plain-torch algorithms as a backend: exact, on any CPU or CUDA device, and slow."""

import torch

from ..backend import Backend, HeadDimUpTo, OnDevice
from . import SCHEMES, reference_attention, sagebwd_attention


def _forward(q, k, v, *, precision: str, mask, scale: float, causal: bool) -> torch.Tensor:
    return reference_attention(
        q, k, v, scheme=SCHEMES[precision], mask=mask, scale=scale, causal=causal
    )


REFERENCE = Backend(
    name="reference",
    precisions=tuple(SCHEMES),
    native=False,
    # float64 accelerators (MPS has none) and exotic devices were never checked against FP64.
    constraints=(OnDevice(("cpu", "cuda")), HeadDimUpTo(256)),
    forward=_forward,
    train=sagebwd_attention,
)
