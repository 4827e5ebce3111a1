"""FP4 attention as backends: native where the GPU has FP4 units, emulated where somebody asks."""

from ..backend import Backend, Capability
from .fp4_proof import prove
from .operands import CONSTRAINTS, in_one_dtype
from .sm120_fp4 import EMULATED, NATIVE, attend

SM120_FP4 = Backend(
    name="sm120_fp4",
    precisions=("fp4",),
    native=True,
    constraints=(Capability((12, 0), (12, 1)), *CONSTRAINTS),
    forward=in_one_dtype(attend, fp4=NATIVE),
    proof=prove,
)

EMULATED_FP4 = Backend(
    name="emulated_fp4",
    precisions=("fp4",),
    native=False,
    constraints=(Capability((8, 0), (12, 1)), *CONSTRAINTS),
    forward=in_one_dtype(attend, fp4=EMULATED),
    on_request=True,
)
