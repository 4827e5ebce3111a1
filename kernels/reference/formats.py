"""Number formats below 16 bits, emulated exactly in FP32.

Element formats (OCP 8-bit Floating Point and Microscaling specifications, PTX ISA):

    E2M1   0, .5, 1, 1.5, 2, 3, 4, 6 and negatives; no inf, no NaN; saturates at 6
    E4M3   "fn" form: largest 448, smallest subnormal 2^-9, no inf; saturates here
    E8M0   powers of two from 2^-127 to 2^127

All round to nearest, ties to the even code. Block formats add scales, all computed in FP32:

    NVFP4  16 E2M1 values per E4M3 scale, and one FP32 scale per matrix that puts the largest block
           scale at 448, so that small tensors do not fall into E4M3's subnormals
    MXFP4  32 E2M1 values per E8M0 scale
    INT8   round(x / s) in [-127, 127], s = amax / 127 in FP32

What divides is always the scale as stored, after its own rounding, and never a zero.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

E2M1_MAX = 6.0
E4M3_MAX = 448.0
INT8_MAX = 127.0
UINT8_MAX = 255.0
NVFP4_BLOCK = 16
MXFP4_BLOCK = 32
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Block maxima that a scale may map to E2M1's maximum: a target under 6 lets the largest value
# saturate or land on a finer part of the grid when that lowers the block's squared error.
SEARCH_TARGETS = (6.0, 5.0, 4.5, 4.0)


# ---------------------------------------------------------------------------- element formats
def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 value of each element of ``x`` (FP32); NaN stays NaN."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    # 2^floor(log2|x|), read from the exponent bits; below 1 the grid has the step of [1, 2).
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(1.0, 4.0)
    # The step is binade / 2. Adding 1.5 * 2^23 steps leaves no bits below one step, so that the
    # FP32 adder itself rounds to nearest even; an even multiple of the step is an even code.
    anchor = binade.mul_(1.5 * 2.0**22)
    return x.add_(anchor).sub_(anchor)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """4-bit codes (uint8, bit 3 = sign) of values that lie on the E2M1 grid."""
    grid = torch.tensor(E2M1_VALUES, device=values.device)
    code = torch.bucketize(values.abs(), grid)
    return (code | (torch.signbit(values) << 3)).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """FP32 values of 4-bit codes."""
    grid = torch.tensor(E2M1_VALUES, device=codes.device)
    return torch.cat([grid, -grid])[codes.long()]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes per byte along the last dimension, the even element in the low half."""
    if codes.shape[-1] % 2:
        raise ValueError(f"cannot pack an odd number of 4-bit codes ({codes.shape[-1]})")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_nibbles`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 value of each element, saturating at 448, as FP32."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def floor_e8m0(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two not above each positive element, at least 2^-127."""
    exponent = torch.frexp(x.clamp_min(2.0**-127)).exponent - 1
    return torch.ldexp(torch.ones_like(x), exponent)


def quantise_8bit(
    x: torch.Tensor, amax: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scale) with x ~ values * scale: "int8" integers in [-127, 127], or "e4m3" values.

    amax: the largest |x| that shares a scale, FP32, broadcastable to x. All results are FP32.
    """
    if kind == "int8":
        scale = nonzero_scale(amax / INT8_MAX)
        return (x / scale).round_().clamp_(-INT8_MAX, INT8_MAX), scale
    scale = nonzero_scale(amax / E4M3_MAX)
    return round_e4m3(x / scale), scale


# ------------------------------------------------------------------------------ block formats
class Blocks(NamedTuple):
    """A tensor in NVFP4 or MXFP4, blocks along the last dimension.

    elements: [..., n] on the E2M1 grid; scales: [..., n / block, 1] on the E4M3 or E8M0 grid;
    tensor_scale: FP32, broadcastable to the tensor (1 for MXFP4).
    """

    elements: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor

    def without_tensor_scale(self) -> torch.Tensor:
        """What a block-scaled tensor-core product sees: element times block scale."""
        blocks = self.elements.unflatten(-1, (self.scales.shape[-2], -1))
        return (blocks * self.scales).flatten(-2)

    def dequantise(self) -> torch.Tensor:
        return self.without_tensor_scale() * self.tensor_scale


def pad_to_multiple(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Zeros appended to the last dimension until ``multiple`` divides it."""
    missing = -x.shape[-1] % multiple
    return F.pad(x, (0, missing)) if missing else x


def nonzero_scale(scale: torch.Tensor) -> torch.Tensor:
    """``scale`` with 1 in place of 0, so that an all-zero block is divided by 1."""
    return scale + (scale == 0)


def quantise_nvfp4(x: torch.Tensor, *, search: bool = False) -> Blocks:
    """NVFP4 of FP32 matrices ``x`` [..., rows, n], n a multiple of 16, one FP32 scale per matrix.

    search: choose each block scale among amax / SEARCH_TARGETS by least squared error.
    """
    tensor_scale = nonzero_scale(x.abs().amax((-2, -1), keepdim=True) / (E4M3_MAX * E2M1_MAX))
    return nvfp4_blocks(x / tensor_scale, search=search)._replace(tensor_scale=tensor_scale)


def nvfp4_blocks(x: torch.Tensor, *, search: bool = False) -> Blocks:
    """NVFP4 of ``x`` [..., n] whose range already suits E4M3 scales; tensor_scale is 1."""
    blocks = x.unflatten(-1, (-1, NVFP4_BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    if not search:
        return _with_scales(blocks, round_e4m3(amax / E2M1_MAX))
    targets = torch.tensor(SEARCH_TARGETS, device=x.device).view(-1, *[1] * blocks.ndim)
    scales = round_e4m3(amax / targets)
    elements = round_e2m1(blocks / nonzero_scale(scales))
    error = (elements * scales).sub_(blocks).square_().sum(-1, keepdim=True)
    chosen, scale, lowest = elements[0], scales[0], error[0]
    for i in range(1, len(SEARCH_TARGETS)):  # argmin and gather are several times slower on a CPU
        better = error[i] < lowest
        chosen = torch.where(better, elements[i], chosen)
        scale = torch.where(better, scales[i], scale)
        lowest = torch.minimum(lowest, error[i])
    return Blocks(chosen.flatten(-2), scale, _one(x))


def quantise_mxfp4(x: torch.Tensor) -> Blocks:
    """MXFP4 of ``x`` [..., n], n a multiple of 32.

    The scale is 2^(floor(log2 amax) - 2), as OCP MX 1.0 section 6.3 has it: amax may saturate.
    """
    blocks = x.unflatten(-1, (-1, MXFP4_BLOCK))
    return _with_scales(blocks, floor_e8m0(blocks.abs().amax(-1, keepdim=True) / 4.0))


def _with_scales(blocks: torch.Tensor, scales: torch.Tensor) -> Blocks:
    elements = round_e2m1(blocks / nonzero_scale(scales))
    return Blocks(elements.flatten(-2), scales, _one(blocks))


def _one(x: torch.Tensor) -> torch.Tensor:
    return torch.ones((), device=x.device)
