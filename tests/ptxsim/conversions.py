"""cvt: between integers, FP32, and the formats of 16, 8 and 4 bits.

Of a packed result the first operand is the upper part.
"""

from functools import partial

import numpy as np

from .decode import TYPES, lanewise

_ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
# Of a format, where it saturates, and the bits that a NaN becomes.
_FORMATS = {
    "f16": (np.inf, 0x7FFF),
    "bf16": (np.inf, 0x7FFF),
    "e4m3": (448, 0x7F),
    "e2m1": (6, 0x7),
}


def _to_integer(rounded, ends, a):
    """Beyond the range its end; of NaN zero."""
    return np.nan_to_num(np.clip(rounded(a.astype("f8")), ends.min, ends.max), nan=0)


def _to_bits(name, x):
    """In a format, to nearest even."""
    most, nan = _FORMATS[name]
    bits = np.asarray(np.clip(x, -most, most)).astype(TYPES[name])
    bits = bits.view(f"u{bits.itemsize}")
    return np.where(np.isnan(x), bits.dtype.type(nan), bits)


def _to_pair(name, bits):
    return lambda a, b: _to_bits(name, a).astype("u4") << np.uint32(bits) | _to_bits(name, b)


def _to_halves(name, bits):
    pair = _to_pair("f16", 16)

    def convert(codes):
        parts = (codes >> bits, codes & (1 << bits) - 1)
        return pair(*(x.astype("u1").view(TYPES[name]).astype("f4") for x in parts))

    return convert


def _bytes_above(a, b, c):
    a, b = (np.clip(x, 0, 255).astype("u4") for x in (a, b))
    return c << np.uint32(16) | a << np.uint32(8) | b


lanewise(r"cvt\.([us]\d+)\.([us]\d+)", "0 1", lambda a: a)
lanewise(r"cvt\.rn\.f32\.([us]\d+)", "f32 0", lambda a: a)
lanewise(r"cvt\.f32\.(f16|bf16)", "f32 0", lambda a: a)
lanewise(r"cvt\.pack\.sat\.u8\.s32\.b32", "b32 s32 s32 b32", _bytes_above)
lanewise(r"cvt\.(rni|rzi|rmi|rpi)\.f32\.f32", "f32 f32", _ROUNDED)
for _type in ("s32", "u32"):
    _ends = np.iinfo(TYPES[_type])
    _integers = {name: partial(_to_integer, how, _ends) for name, how in _ROUNDED.items()}
    lanewise(rf"cvt\.(rni|rzi|rmi|rpi)\.{_type}\.f32", f"{_type} f32", _integers)
_HALF = {name: partial(_to_bits, name) for name in ("f16", "bf16")}
lanewise(r"cvt\.rn\.(f16|bf16)\.f32", "b16 f32", _HALF)
for _type in _HALF:
    lanewise(rf"cvt\.rn\.{_type}x2\.f32", "b32 f32 f32", _to_pair(_type, 16))
for _type, _bits in (("e4m3", 8), ("e2m1", 4)):
    lanewise(
        rf"cvt\.rn\.satfinite\.{_type}x2\.f32", f"b{2 * _bits} f32 f32", _to_pair(_type, _bits)
    )
    lanewise(rf"cvt\.rn\.f16x2\.{_type}x2", f"b32 b{2 * _bits}", _to_halves(_type, _bits))
