"""draft"""
from ..jit.variants import Variant
from .operands import OUTPUT, TENSOR

def attention_variant(head_dim, keys, dtype, stages, turns):
    return Variant(
        source="sm90_int8_attention.cu",
        kernel="sm90_int8_attention",
        template=(head_dim, keys, dtype, stages, turns),
        params=f"4Q{TENSOR}{OUTPUT}Q6i",
        threads=384,
        shared_bytes=stages * (keys * head_dim * 3 + 24),
        first_sm=90,
        last_sm=90,
    )
