"""INT8 attention as a backend: for inference, and with a backward pass."""

from ..backend import Backend, Capability, Dtypes, HeadDimUpTo, OneDtype
from .operands import CONSTRAINTS, in_one_dtype
from .sm80_int8 import attend
from .sm80_sagebwd import HEAD_DIMS, TRAINED_DTYPES, train

SM80_INT8 = Backend(
    name="sm80_int8",
    precisions=("int8",),
    native=True,
    constraints=(Capability((8, 0), (12, 1)), *CONSTRAINTS),
    forward=in_one_dtype(attend),
    train=train,
    train_constraints=(Dtypes(TRAINED_DTYPES), OneDtype(), HeadDimUpTo(HEAD_DIMS[-1])),
)
