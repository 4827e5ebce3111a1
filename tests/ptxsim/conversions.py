"""cvt: between integers, FP32, and the formats of 16, 8 and 4 bits.

Of a packed result the first operand is the upper part.
"""

import ml_dtypes
import numpy as np

from .arithmetic import unary
from .decode import TYPES, instruction

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
E4M3_VALUES = np.arange(256, dtype="u1").view(E4M3).astype("f4")
E2M1_VALUES = np.arange(16, dtype="u1").view(E2M1).astype("f4")
_ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction(r"cvt\.([us]\d+)\.([us]\d+)")
def _integers(op, to, dtype):
    d, a = op.operands
    put, a = op.write(d, to), op.read(a, dtype)
    return lambda m: put(m, np.asarray(a(m)).astype(TYPES[to]))


@instruction(r"cvt\.pack\.sat\.u8\.s32\.b32")
def _saturated_bytes(op):
    """The low half of c above the bytes of a and b."""
    d, a, b, c = op.operands
    put, a, b, c = op.write(d, "b32"), op.read(a, "s32"), op.read(b, "s32"), op.read(c, "b32")

    def run(m):
        high, low = (np.clip(x(m), 0, 255).astype("u4") for x in (a, b))
        put(m, c(m) << np.uint32(16) | high << np.uint32(8) | low)

    return run


@instruction(r"cvt\.rn\.f32\.([us]\d+)")
def _to_float(op, dtype):
    d, a = op.operands
    put, a = op.write(d, "f32"), op.read(a, dtype)
    return lambda m: put(m, np.asarray(a(m)).astype("f4"))


@instruction(r"cvt\.(rni|rzi|rmi|rpi)\.f32\.f32")
def _to_whole(op, rounding):
    return unary(op, "f32", _ROUNDED[rounding])


@instruction(r"cvt\.(rni|rzi|rmi|rpi)\.([us]32)\.f32")
def _to_integer(op, rounding, to):
    """Beyond the range its end; of NaN zero."""
    d, a = op.operands
    put, a = op.write(d, to), op.read(a, "f32")
    ends = np.iinfo(TYPES[to])

    def run(m):
        whole = _ROUNDED[rounding](a(m).astype("f8"))
        put(m, np.nan_to_num(np.clip(whole, ends.min, ends.max), nan=0).astype(TYPES[to]))

    return run


@instruction(r"cvt\.f32\.(f16|bf16)")
def _from_half(op, dtype):
    d, a = op.operands
    put, a = op.write(d, "f32"), op.read(a, dtype)
    return lambda m: put(m, a(m).astype("f4"))


def to_half(x, dtype: str):
    """Bits of ``x`` in FP16 or BF16, to nearest even; NaN as 0x7fff."""
    bits = np.asarray(x).astype(TYPES[dtype]).view("u2")
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


@instruction(r"cvt\.rn\.(f16|bf16)\.f32")
def _to_half(op, dtype):
    d, a = op.operands
    put, a = op.write(d, "b16"), op.read(a, "f32")
    return lambda m: put(m, to_half(a(m), dtype))


@instruction(r"cvt\.rn\.(f16|bf16)x2\.f32")
def _to_halves(op, dtype):
    d, a, b = op.operands
    put, a, b = op.write(d, "b32"), op.read(a, "f32"), op.read(b, "f32")
    return lambda m: put(
        m,
        to_half(a(m), dtype).astype("u4") << np.uint32(16) | to_half(b(m), dtype),
    )


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
    d, a, b = op.operands
    convert, bits = (to_e4m3, 8) if dtype == "e4m3" else (to_e2m1, 4)
    to = f"b{2 * bits}"
    put, a, b = op.write(d, to), op.read(a, "f32"), op.read(b, "f32")
    shift = TYPES[to].type(bits)
    return lambda m: put(m, convert(a(m)).astype(TYPES[to]) << shift | convert(b(m)))


@instruction(r"cvt\.rn\.f16x2\.(e4m3|e2m1)x2")
def _from_small(op, dtype):
    d, a = op.operands
    values, bits = (E4M3_VALUES, 8) if dtype == "e4m3" else (E2M1_VALUES, 4)
    put, a = op.write(d, "b32"), op.read(a, f"b{2 * bits}")
    halves = to_half(values, "f16").astype("u4")
    mask = (1 << bits) - 1

    def run(m):
        codes = a(m)
        put(m, halves[codes >> codes.dtype.type(bits)] << np.uint32(16) | halves[codes & mask])

    return run
