"""What a quantised attention does to its operands: one value object per algorithm or ablation."""

from dataclasses import dataclass, replace

QK_FORMATS = ("nvfp4", "mxfp4", "int8", "e4m3", "exact")
QK_SCALES = ("block", "thread")
PV_FORMATS = ("nvfp4", "mxfp4", "uint8", "int8", "e4m3", "exact")
P_SCALINGS = ("two_level", "direct")
V_SCALES = ("channel", "block")


@dataclass(frozen=True)
class Scheme:
    """One way to quantise attention. The defaults are SageAttention3 as published (section 3).

    qk: format of Q and K. NVFP4 and MXFP4 block along the channels; exact is FP32.
    qk_scale: who shares a scale of 8-bit Q and K. block: block_q queries, block_k keys (paper).
        thread: each query has its own, and of block_k keys those that lie in one thread of an
        m16n8 matrix product (SageAttention2, section 3.2); finer, at no cost in the product.
    pv: format of P and V. NVFP4 and MXFP4 block along the tokens; uint8 is P in 0..255 and V in
        INT8, int8 is P in 0..127 and V in INT8, both with a scale of P per row and tile; e4m3 is
        P and V in FP8.
    smooth_k, smooth_v: subtract the token mean. smooth_q: subtract the mean of each query block.
    balance: scale channels so that they deviate alike in Q and in K. rotate: then a Hadamard
        rotation of Q and K. Both after the smoothing of K and before that of Q.
    scale_search: choose the NVFP4 scales of Q, K and V by least squared error.
    p_scaling: two_level scales P to 448 * 6 before NVFP4; direct quantises P in [0, 1].
    quantised_row_sum: the denominator sums P as quantised rather than as computed.
    v_scale: scales of an 8-bit V, per channel or per block of block_k tokens.
    block_q, block_k: the FlashAttention tile in tokens.
    """

    qk: str = "nvfp4"
    qk_scale: str = "block"
    pv: str = "nvfp4"
    smooth_q: bool = True
    smooth_k: bool = True
    smooth_v: bool = False
    balance: bool = False
    rotate: bool = False
    scale_search: bool = False
    p_scaling: str = "two_level"
    quantised_row_sum: bool = False
    v_scale: str = "channel"
    block_q: int = 128
    block_k: int = 64

    def __post_init__(self):
        for field, known in (
            ("qk", QK_FORMATS),
            ("qk_scale", QK_SCALES),
            ("pv", PV_FORMATS),
            ("p_scaling", P_SCALINGS),
            ("v_scale", V_SCALES),
        ):
            if getattr(self, field) not in known:
                raise ValueError(
                    f"{field}={getattr(self, field)!r}: choose one of {', '.join(known)}"
                )
        if self.block_q < 1 or self.block_k < 32 or self.block_k % 32:
            raise ValueError(
                f"tile {self.block_q} x {self.block_k}: block_k must be a multiple of 32, "
                "the largest block along the keys"
            )


_INT8_QK = Scheme(qk="int8", qk_scale="thread", smooth_q=False, smooth_v=True, rotate=True)

# The best of each precision at the cost of its matrix products, by the figures in docs/numerics.md.
# Rotation alone harms NVFP4, whose blocks contain outlier channels; after balancing it helps.
SCHEMES: dict[str, Scheme] = {
    "fp4": Scheme(
        scale_search=True, smooth_v=True, quantised_row_sum=True, balance=True, rotate=True
    ),
    "int8_fp4": replace(_INT8_QK, scale_search=True, quantised_row_sum=True),
    "int8": replace(_INT8_QK, pv="uint8"),
}
