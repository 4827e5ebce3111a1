"""cvt: between integers, FP32, and the formats of 16, 8 and 4 bits.

Of a packed result the first operand is the upper part.
"""

import ml_dtypes
import numpy as np

from .decode import TYPES, elementwise, instruction

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
E4M3_VALUES = np.arange(256, dtype="u1").view(E4M3).astype("f4")
E2M1_VALUES = np.arange(16, dtype="u1").view(E2M1).astype("f4")
_ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction(r"cvt\.([us]\d+)\.([us]\d+)|cvt\.rn\.(f32)\.([us]\d+)|cvt\.(f32)\.(f16|bf16)")
def _as_they_are(op, *types):
    to, dtype = (x for x in types if x)
    return elementwise(op, to, dtype, function=lambda a: a.astype(TYPES[to]))


@instruction(r"cvt\.pack\.sat\.u8\.s32\.b32")
def _saturated_bytes(op):
    """The low half of c above the bytes of a and b."""

    def packed(a, b, c):
        high, low = (np.clip(x, 0, 255).astype("u4") for x in (a, b))
        return c << np.uint32(16) | high << np.uint32(8) | low

    return elementwise(op, "b32", "s32", "s32", "b32", function=packed)


@instruction(r"cvt\.(rni|rzi|rmi|rpi)\.f32\.f32")
def _to_whole(op, rounding):
    return elementwise(op, "f32", "f32", function=_ROUNDED[rounding])


@instruction(r"cvt\.(rni|rzi|rmi|rpi)\.([us]32)\.f32")
def _to_integer(op, rounding, to):
    """Beyond the range its end; of NaN zero."""
    ends = np.iinfo(TYPES[to])

    def rounded(a):
        whole = np.clip(_ROUNDED[rounding](a.astype("f8")), ends.min, ends.max)
        return np.nan_to_num(whole, nan=0).astype(TYPES[to])

    return elementwise(op, to, "f32", function=rounded)


def to_half(x, dtype: str):
    """Bits of ``x`` in FP16 or BF16, to nearest even; NaN as 0x7fff."""
    bits = np.asarray(x).astype(TYPES[dtype]).view("u2")
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


@instruction(r"cvt\.rn\.(f16|bf16)\.f32")
def _to_half(op, dtype):
    return elementwise(op, "b16", "f32", function=lambda a: to_half(a, dtype))


@instruction(r"cvt\.rn\.(f16|bf16)x2\.f32")
def _to_halves(op, dtype):
    def packed(a, b):
        return to_half(a, dtype).astype("u4") << np.uint32(16) | to_half(b, dtype)

    return elementwise(op, "b32", "f32", "f32", function=packed)


def to_e4m3(x):
    """Bits of ``x``, to nearest even, no larger than 448; NaN as 0x7f."""
    bits = np.clip(x, np.float32(-448), np.float32(448)).astype(E4M3).view("u1")
    return np.where(np.isnan(x), np.uint8(0x7F), bits)


def to_e2m1(x):
    """Bits of ``x``, to nearest even, no larger than 6; NaN as 6."""
    x = np.where(np.isnan(x), np.float32(6), np.clip(x, np.float32(-6), np.float32(6)))
    return x.astype(E2M1).view("u1") & np.uint8(15)


@instruction(r"cvt\.rn\.satfinite\.(e4m3|e2m1)x2\.f32")
def _to_small(op, dtype):
    convert, bits = (to_e4m3, 8) if dtype == "e4m3" else (to_e2m1, 4)
    to = TYPES[f"b{2 * bits}"]

    def packed(a, b):
        return convert(a).astype(to) << to.type(bits) | convert(b)

    return elementwise(op, to, "f32", "f32", function=packed)


@instruction(r"cvt\.rn\.f16x2\.(e4m3|e2m1)x2")
def _from_small(op, dtype):
    values, bits = (E4M3_VALUES, 8) if dtype == "e4m3" else (E2M1_VALUES, 4)
    halves = to_half(values, "f16").astype("u4")
    low = (1 << bits) - 1

    def unpacked(codes):
        return halves[codes >> codes.dtype.type(bits)] << np.uint32(16) | halves[codes & low]

    return elementwise(op, "b32", f"b{2 * bits}", function=unpacked)
