"""What a quantised attention does to its operands: one value object per algorithm or ablation."""

from dataclasses import dataclass

QK_FORMATS = ("nvfp4", "mxfp4", "int8", "exact")
PV_FORMATS = ("nvfp4", "mxfp4", "uint8", "int8", "e4m3", "exact")
P_SCALINGS = ("two_level", "direct")
V_SCALES = ("channel", "block")


@dataclass(frozen=True)
class Scheme:
    """One way to quantise attention. The defaults are SageAttention3 as published (section 3).

    qk: format of Q and K. NVFP4 and MXFP4 block along the channels; INT8 shares one scale per
        block of block_q queries or block_k keys; exact is FP32.
    pv: format of P and V. NVFP4 and MXFP4 block along the tokens; uint8 is P in 0..255 and V in
        INT8, int8 is P in 0..127 and V in INT8, both with a scale of P per row and tile; e4m3 is
        P and V in FP8.
    smooth_k, smooth_v: subtract the token mean. smooth_q: subtract the mean of each query block.
    rotate: Hadamard rotation of Q and K before everything else.
    scale_search: choose the NVFP4 scales of Q, K and V by least squared error.
    p_scaling: two_level scales P to 448 * 6 before NVFP4; direct quantises P in [0, 1].
    quantised_row_sum: the denominator sums P as quantised rather than as computed.
    v_scale: scales of an 8-bit V, per channel or per block of block_k tokens.
    block_q, block_k: the FlashAttention tile in tokens.
    """

    qk: str = "nvfp4"
    pv: str = "nvfp4"
    smooth_q: bool = True
    smooth_k: bool = True
    smooth_v: bool = False
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


SCHEMES: dict[str, Scheme] = {
    "fp4": Scheme(scale_search=True, smooth_v=True, quantised_row_sum=True),
    "int8_fp4": Scheme(
        qk="int8", smooth_q=False, scale_search=True, smooth_v=True, quantised_row_sum=True
    ),
    "int8": Scheme(qk="int8", pv="uint8", smooth_q=False, smooth_v=True),
}
