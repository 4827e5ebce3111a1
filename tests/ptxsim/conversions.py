"""cvt: between integers, FP32, and the formats of 16, 8 and 4 bits.

Of a packed result the first operand is the upper part.
"""

from functools import partial

import ml_dtypes
import numpy as np

from .decode import TYPES, lanewise

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
E4M3_VALUES = np.arange(256, dtype="u1").view(E4M3).astype("f4")
E2M1_VALUES = np.arange(16, dtype="u1").view(E2M1).astype("f4")
_ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _to_integer(rounded, ends, a):
    """Beyond the range its end; of NaN zero."""
    return np.nan_to_num(np.clip(rounded(a.astype("f8")), ends.min, ends.max), nan=0)


def _to_half(dtype, x):
    """Bits in FP16 or BF16, to nearest even; NaN as 0x7fff."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), np.asarray(x).astype(TYPES[dtype]).view("u2"))


def _to_e4m3(x):
    """Bits, to nearest even, no larger than 448; NaN as 0x7f."""
    bits = np.clip(x, np.float32(-448), np.float32(448)).astype(E4M3).view("u1")
    return np.where(np.isnan(x), np.uint8(0x7F), bits)


def _to_e2m1(x):
    """Bits, to nearest even, no larger than 6; NaN as 6."""
    x = np.where(np.isnan(x), np.float32(6), np.clip(x, np.float32(-6), np.float32(6)))
    return x.astype(E2M1).view("u1") & np.uint8(15)


def _to_byte(x):
    return np.clip(x, 0, 255)


def _joined(convert, bits):
    return lambda a, b: convert(a).astype("u4") << np.uint32(bits) | convert(b)


def _bytes_above(a, b, c):
    return c << np.uint32(16) | _joined(_to_byte, 8)(a, b).astype("u4")


def _halves_of(values, bits):
    halves, low = _to_half("f16", values).astype("u4"), (1 << bits) - 1
    return lambda codes: halves[codes >> bits] << np.uint32(16) | halves[codes & low]


def _as_it_is(a):
    return a


_HALF = {name: partial(_to_half, name) for name in ("f16", "bf16")}
lanewise(r"cvt\.([us]\d+)\.([us]\d+)", "0 1", _as_it_is)
lanewise(r"cvt\.rn\.f32\.([us]\d+)", "f32 0", _as_it_is)
lanewise(r"cvt\.f32\.(f16|bf16)", "f32 0", _as_it_is)
lanewise(r"cvt\.pack\.sat\.u8\.s32\.b32", "b32 s32 s32 b32", _bytes_above)
lanewise(r"cvt\.(rni|rzi|rmi|rpi)\.f32\.f32", "f32 f32", _ROUNDED)
for _type in ("s32", "u32"):
    _ends = np.iinfo(TYPES[_type])
    _integers = {name: partial(_to_integer, how, _ends) for name, how in _ROUNDED.items()}
    lanewise(rf"cvt\.(rni|rzi|rmi|rpi)\.{_type}\.f32", f"{_type} f32", _integers)
lanewise(r"cvt\.rn\.(f16|bf16)\.f32", "b16 f32", _HALF)
_PAIRS = {name: _joined(convert, 16) for name, convert in _HALF.items()}
lanewise(r"cvt\.rn\.(f16|bf16)x2\.f32", "b32 f32 f32", _PAIRS)
lanewise(r"cvt\.rn\.satfinite\.e4m3x2\.f32", "b16 f32 f32", _joined(_to_e4m3, 8))
lanewise(r"cvt\.rn\.satfinite\.e2m1x2\.f32", "b8 f32 f32", _joined(_to_e2m1, 4))
lanewise(r"cvt\.rn\.f16x2\.e4m3x2", "b32 b16", _halves_of(E4M3_VALUES, 8))
lanewise(r"cvt\.rn\.f16x2\.e2m1x2", "b32 b8", _halves_of(E2M1_VALUES, 4))
