"""Arithmetic, logic, comparisons and moves. NaNs are NaN; their payloads are not modelled."""

import operator
from functools import partial

import numpy as np

from .decode import TYPES, instruction, lanewise, parts_of, read, write
from .ptx import KernelError

_SMALLEST_NORMAL = np.float32(2.0**-126)


# ---------------------------------------------------------------------------------------- integers
def _product(a, b):
    """With twice the bits; of 64 in Python's integers."""
    size = a.dtype.itemsize
    return np.multiply(a, b, dtype=object if size == 8 else f"{a.dtype.kind}{2 * size}")


def _shifted(shift, a, amount):
    """NumPy shifts all bits out as PTX does, by amounts that are positive in the type of ``a``."""
    return shift(a, np.minimum(amount, 255).astype(a.dtype))


def _permuted(a, b, choices):
    choices = np.asarray(choices)[..., None] >> np.arange(0, 16, 4, dtype="u4")
    both = b.astype("u8") << np.uint64(32) | a
    chosen = (both[..., None] >> (choices & 7) * 8).astype("u1")
    return np.where(choices & 8, (chosen >> 7) * np.uint8(255), chosen).view("u4")[..., 0]


def _dot_of_bytes(a, b, c):
    a, b = (np.array(x)[..., None].view(f"{x.dtype.kind}1").astype("i4") for x in (a, b))
    return (a * b).sum(-1, dtype="i4").view("u4") + c


def _inserted(a, b, start, count):
    start, count = (np.minimum(x & 255, 32).astype("u8") for x in (start, count))
    ones = ((np.uint64(1) << count) - np.uint64(1)) << start
    return a.astype("u8") << start & ones | b & ~ones


_INTEGER = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
    "not": np.invert,
    "neg": np.negative,
    "abs": np.abs,
    "shl": partial(_shifted, np.left_shift),
    "shr": partial(_shifted, np.right_shift),
}
lanewise(r"(add|sub|mul\.lo|and|or|xor|min|max)\.([bus]\d+|pred)", "1 1 1", _INTEGER)
lanewise(r"(not|neg|abs)\.([bs]\d+|pred)", "1 1", _INTEGER)
lanewise(r"(shl|shr)\.([bus](?:16|32|64))", "1 1 u32", _INTEGER)
lanewise(r"max\.relu\.s32", "s32 s32 s32", lambda a, b: np.maximum(np.maximum(a, b), 0))
lanewise(r"mul\.wide\.([us](?:16|32))", "+0 0 0", _product)
lanewise(r"mad\.wide\.([us](?:16|32))", "+0 0 0 +0", lambda a, b, c: _product(a, b) + c)
lanewise(r"mad\.lo\.([us]\d+)", "0 0 0 0", lambda a, b, c: a * b + c)
lanewise(r"mul\.hi\.([us]\d+)", "0 0 0", lambda a, b: _product(a, b) >> 8 * a.dtype.itemsize)
lanewise(r"prmt\.b32", "u32 u32 u32 u32", _permuted)
lanewise(r"dp4a\.([us]32)\.([us]32)", "u32 0 1 u32", _dot_of_bytes)
lanewise(r"popc\.b32", "u32 u32", np.bitwise_count)
lanewise(r"bfi\.b32", "u32 u32 u32 u32 u32", _inserted)


@instruction(r"(div|rem)\.([us]\d+)")
def _divide(name, dtype, d, a, b):
    put, a, b = write(d, dtype), read(a, dtype), read(b, dtype)

    def run(m):
        x, y = a(m), b(m)
        if (m.mask & (y == 0)).any():
            raise KernelError("division by zero")
        rest = np.fmod(x, y)  # has the sign of x, as in PTX
        put(m, rest if name == "rem" else (x - rest) // y)

    return run


# ---------------------------------------------------------------------------------- floating point
def fused(a, b, c):
    """a * b + c in FP32, rounded once."""
    product = np.multiply(a, b, dtype="f8")  # exact
    total = np.asarray(product + c)
    bits = total.view("u8")
    # Rounded to FP64 and then to FP32: wrong only if the first rounding made a tie of it, or if the
    # result has fewer bits than a normal number. Where either may be, round the first to odd.
    tie = bits & np.uint64(0x1FFFFFFF) == np.uint64(0x10000000)
    if tie.any() or (np.abs(total) < _SMALLEST_NORMAL).any():
        part = total - product
        error = (product - (total - part)) + (c - part)
        to_odd = (error != 0) & np.isfinite(total) & (bits & np.uint64(1) == 0)
        toward = np.where(error > 0, np.inf, -np.inf)
        total = np.where(to_odd, np.nextafter(total, toward), total)
    return total


def _extreme(choose, merge, a, b):
    """Minimum or maximum; of zeros, whose bits differ in the sign alone, minus zero is less."""
    zero = (a == b) & (a == 0)
    if not zero.any():
        return choose(a, b)
    bits = f"u{a.dtype.itemsize}"
    return np.where(zero, merge(a.view(bits), b.view(bits)).view(a.dtype), choose(a, b))


def _flushed(x):
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def _approximate(exact, a):
    """The exact value rounded, which is within the documented errors: 2^-22 of 2^x, for the
    logarithm 2^-22 absolute or relative, and 1 in the last place of 1/x."""
    return _flushed(exact(_flushed(a).astype("f8")).astype("f4"))


def _in_halves(dtype, function):
    """``function`` of both halves of words."""

    def run(*words):
        halves = np.stack(np.broadcast_arrays(*words))[..., None].view(dtype)
        return function(*halves).astype(dtype, copy=False).view("u4")[..., 0]

    return run


_FLOAT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "neg": np.negative,
    "abs": np.abs,
    "min": partial(_extreme, np.fmin, np.bitwise_or),
    "max": partial(_extreme, np.fmax, np.bitwise_and),
    "min.NaN": partial(_extreme, np.minimum, np.bitwise_or),
    "max.NaN": partial(_extreme, np.maximum, np.bitwise_and),
    "ex2.approx": partial(_approximate, np.exp2),
    "lg2.approx": partial(_approximate, np.log2),
    "rcp.approx": partial(_approximate, np.reciprocal),
}
lanewise(r"(add|sub|mul|div(?=\.rn))(?:\.rn)?\.f32", "f32 f32 f32", _FLOAT)
lanewise(r"(rcp|sqrt)\.rn\.f32", "f32 f32", _FLOAT)
lanewise(r"(neg|abs)\.f32", "f32 f32", _FLOAT)
lanewise(r"((?:min|max)(?:\.NaN)?)\.f32", "f32 f32 f32", _FLOAT)
lanewise(r"((?:ex2|lg2|rcp)\.approx)\.ftz\.f32", "f32 f32", _FLOAT)
lanewise(r"fma\.rn\.f32", "f32 f32 f32 f32", fused)
lanewise(r"copysign\.f32", "f32 f32 f32", lambda sign, x: np.copysign(x, sign))
for _type in ("f16", "bf16"):
    _halves = {name: _in_halves(TYPES[_type], function) for name, function in _FLOAT.items()}
    lanewise(rf"((?:min|max)\.NaN)\.{_type}x2", "u32 u32 u32", _halves)
    # In FP32 and rounded again: for one operation the rounding to 16 bits.
    lanewise(rf"(add|sub|mul)\.rn\.{_type}x2", "u32 u32 u32", _halves)
# FP64 holds product and sum wherever they are near a tie of FP16.
_fused_halves = _in_halves(TYPES["f16"], lambda a, b, c: a.astype("f8") * b + c)
lanewise(r"fma\.rn\.f16x2", "u32 u32 u32 u32", _fused_halves)


# ------------------------------------------------------------------------------- choices and moves
_ORDER = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_FLOAT_ORDER = _ORDER | {  # false with a NaN
    "ne": lambda a, b: (a < b) | (a > b),
    "num": lambda a, b: (a == a) & (b == b),
}
_OPPOSITE = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
for _name, _opposite in (_OPPOSITE | {"nan": "num"}).items():  # true with a NaN
    _FLOAT_ORDER[_name] = lambda a, b, f=_FLOAT_ORDER[_opposite]: ~f(a, b)
_COMBINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.not_equal}


@instruction(r"setp\.([a-z]+)(?:\.(and|or|xor))?\.([bus]\d+|f32)")
def _compare(comparison, combine, dtype, d, a, b, *third):
    put, put_opposite = (write(x, "pred") for x in (*parts_of(d), None)[:2])
    a, b, third = read(a, dtype), read(b, dtype), [read(x, "pred") for x in third]
    compare = (_FLOAT_ORDER if dtype == "f32" else _ORDER)[comparison]

    def run(m):
        result = compare(a(m), b(m))
        opposite = ~result
        for other in third:
            result, opposite = (_COMBINED[combine](x, other(m)) for x in (result, opposite))
        put(m, result)
        put_opposite(m, opposite)

    return run


lanewise(r"selp\.([busf]\d+)", "0 0 0 pred", lambda a, b, p: np.where(p, a, b))
lanewise(r"(?:mov|cvta\.to\.global)\.([busf]\d+|pred)", "0 0", lambda a: a)
