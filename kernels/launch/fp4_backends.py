"""Attention on FP4 units as backends: native where a GPU has them, emulated where asked for."""

from functools import partial

from ..backend import Backend, Capability
from .fp4_proof import prove
from .operands import CONSTRAINTS, in_one_dtype
from .sm120_fp4 import EMULATED, NATIVE, attend


def _native(precision: str) -> Backend:
    return Backend(
        name=f"sm120_{precision}",
        precisions=(precision,),
        native=True,
        constraints=(Capability((12, 0), (12, 1)), *CONSTRAINTS),
        forward=in_one_dtype(attend, precision=precision, fp4=NATIVE),
        proof=partial(prove, precision),
    )


def _emulated(precision: str) -> Backend:
    return Backend(
        name=f"emulated_{precision}",
        precisions=(precision,),
        native=False,
        constraints=(Capability((8, 0), (12, 1)), *CONSTRAINTS),
        forward=in_one_dtype(attend, precision=precision, fp4=EMULATED),
        unasked=None,
    )


SM120_FP4, SM120_INT8_FP4 = _native("fp4"), _native("int8_fp4")
EMULATED_FP4, EMULATED_INT8_FP4 = _emulated("fp4"), _emulated("int8_fp4")
