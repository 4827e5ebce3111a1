"""The algorithms in plain torch: readable specification, CPU path, oracle of the native kernels."""

from .exact import exact_attention
from .forward import reference_attention
from .sagebwd import SageBwdOptions, sagebwd_attention
from .scheme import SCHEMES, Scheme

__all__ = [
    "SCHEMES",
    "SageBwdOptions",
    "Scheme",
    "exact_attention",
    "reference_attention",
    "sagebwd_attention",
]
