"""FP4 attention as backends: native where the GPU has FP4 units, emulated where somebody asks."""

from functools import partial

import torch

from ..backend import Backend, Capability
from .fp4_proof import prove
from .operands import CONSTRAINTS, in_one_dtype
from .sm120_fp4 import EMULATED, NATIVE, attend


def _forward(q, k, v, *, precision: str, **options) -> torch.Tensor:
    return in_one_dtype(attend, q, k, v, **options)


SM120_FP4 = Backend(
    name="sm120_fp4",
    precisions=("fp4",),
    native=True,
    constraints=(Capability((12, 0), (12, 1)), *CONSTRAINTS),
    forward=partial(_forward, fp4=NATIVE),
    proof=prove,
)

EMULATED_FP4 = Backend(
    name="emulated_fp4",
    precisions=("fp4",),
    native=False,
    constraints=(Capability((8, 0), (12, 1)), *CONSTRAINTS),
    forward=partial(_forward, fp4=EMULATED),
    on_request=True,
)
