"""FP4 attention as backends: native where the GPU has FP4 units, emulated where somebody asks."""

from functools import partial

import torch

from ..backend import Backend, Capability, Dtypes, HeadDimUpTo
from .fp4_proof import prove
from .sm120_fp4 import EMULATED, NATIVE, attend


def _forward(q, k, v, *, precision: str, mask, scale: float, causal: bool, fp4: str):
    if not q.dtype == k.dtype == v.dtype:  # FP32 holds what any of them may, FP16 does not
        out = attend(
            q.float(), k.float(), v.float(), mask=mask, scale=scale, causal=causal, fp4=fp4
        )
        return out.to(q.dtype)
    return attend(q, k, v, mask=mask, scale=scale, causal=causal, fp4=fp4)


_SHAPES = (Dtypes((torch.float16, torch.bfloat16, torch.float32)), HeadDimUpTo(256))

SM120_FP4 = Backend(
    name="sm120_fp4",
    precisions=("fp4",),
    native=True,
    constraints=(Capability((12, 0), (12, 1)), *_SHAPES),
    forward=partial(_forward, fp4=NATIVE),
    proof=prove,
)

EMULATED_FP4 = Backend(
    name="emulated_fp4",
    precisions=("fp4",),
    native=False,
    constraints=(Capability((8, 0), (12, 1)), *_SHAPES),
    forward=partial(_forward, fp4=EMULATED),
    on_request=True,
)
