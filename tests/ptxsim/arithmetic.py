"""Arithmetic, logic, comparisons and moves. NaNs are NaN; their payloads are not modelled."""

from functools import partial

import numpy as np

from .decode import TYPES, elementwise, instruction
from .ptx import KernelError, Pair, Vector

_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_SMALLEST_NORMAL = np.float32(2.0**-126)


# ---------------------------------------------------------------------------------------- integers
_INTEGER = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
}


@instruction(r"(add|sub|mul\.lo|and|or|xor|min|max)\.([bus]\d+|pred)")
def _integer(op, name, dtype):
    return elementwise(op, dtype, dtype, dtype, function=_INTEGER[name])


@instruction(r"(min|max)\.relu\.s32")
def _at_least_zero(op, name):
    zero = np.int32(0)
    return elementwise(
        op, "s32", "s32", "s32", function=lambda a, b: np.maximum(_INTEGER[name](a, b), zero)
    )


@instruction(r"(not|neg|abs)\.([bs]\d+|pred)")
def _one_integer(op, name, dtype):
    function = {"not": np.invert, "neg": np.negative, "abs": np.abs}[name]
    return elementwise(op, dtype, dtype, function=function)


@instruction(r"mul\.wide\.([us](?:16|32))")
def _wide(op, dtype):
    wide = _WIDE[dtype]
    return elementwise(op, wide, dtype, dtype, function=partial(np.multiply, dtype=TYPES[wide]))


@instruction(r"mul\.hi\.([us])(16|32)")
def _high(op, kind, bits):
    dtype, wide = TYPES[kind + bits], TYPES[_WIDE[kind + bits]]

    def high(a, b):
        return (np.multiply(a, b, dtype=wide) >> int(bits)).astype(dtype)

    return elementwise(op, dtype, dtype, dtype, function=high)


@instruction(r"mul\.hi\.u64")
def _highest(op):
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)

    def high(a, b):
        a, a_low, b, b_low = a >> half, a & low, b >> half, b & low
        middle = a * b_low + (a_low * b_low >> half)
        return a * b + (middle >> half) + (a_low * b + (middle & low) >> half)

    return elementwise(op, "u64", "u64", "u64", function=high)


@instruction(r"mad\.(lo|wide)\.([us]\d+)")
def _mad(op, part, dtype):
    to = _WIDE[dtype] if part == "wide" else dtype

    def mad(a, b, c):
        return np.multiply(a, b, dtype=TYPES[to]) + c

    return elementwise(op, to, dtype, dtype, to, function=mad)


@instruction(r"(div|rem)\.([us]\d+)")
def _divide(op, name, dtype):
    one = TYPES[dtype].type(1)
    d, a, b = op.operands
    put, a, b = op.write(d, dtype), op.read(a, dtype), op.read(b, dtype)

    def run(m):
        x, y = a(m), b(m)
        if (m.mask & (y == 0)).any():
            raise KernelError("division by zero")
        y = np.where(y == 0, one, y)
        quotient = x // y
        # NumPy rounds down, PTX towards zero.
        down = (x != quotient * y) & ((x < 0) != (y < 0))
        quotient = quotient + down.astype(quotient.dtype)
        put(m, quotient if name == "div" else x - quotient * y)

    return run


@instruction(r"(shl|shr)\.([bus])(16|32|64)")
def _shift(op, name, kind, bits):
    """Shifts of more than all bits shift all of them out."""
    dtype, most = TYPES[kind + bits], int(bits) - 1
    shift = np.left_shift if name == "shl" else np.right_shift

    def shifted(a, amount):
        result = shift(a, np.minimum(amount, most).astype(dtype))
        return result if dtype.kind == "i" else np.where(amount > most, dtype.type(0), result)

    return elementwise(op, dtype, dtype, "u32", function=shifted)


@instruction(r"prmt\.b32")
def _permute(op):
    def permuted(a, b, choices):
        both = b.astype("u8") << np.uint64(32) | a
        result = np.uint32(0)
        for i in range(4):
            choice = (choices >> np.uint32(4 * i)) & np.uint32(15)
            byte = (both >> ((choice & 7) * 8).astype("u8")).astype("u4") & np.uint32(255)
            sign = np.where(byte & 128, np.uint32(255), np.uint32(0))
            result = result | np.where(choice & 8, sign, byte) << np.uint32(8 * i)
        return result

    return elementwise(op, "u32", "u32", "u32", "u32", function=permuted)


@instruction(r"dp4a\.([us])32\.([us])32")
def _dot_of_bytes(op, kind_a, kind_b):
    def bytes_of(word, kind):
        return np.ascontiguousarray(word)[..., None].view(f"{'iu'[kind == 'u']}1").astype("i4")

    def dot(a, b, c):
        products = bytes_of(a, kind_a) * bytes_of(b, kind_b)
        return products.sum(-1, dtype="i4").view("u4") + c

    return elementwise(op, "u32", "u32", "u32", "u32", function=dot)


@instruction(r"popc\.b32")
def _population(op):
    return elementwise(op, "u32", "u32", function=lambda a: np.bitwise_count(a).astype("u4"))


@instruction(r"bfi\.b32")
def _insert(op):
    def inserted(a, b, start, count):
        start, count = (np.minimum(x & 255, 32).astype("u8") for x in (start, count))
        ones = ((np.uint64(1) << count) - np.uint64(1)) << start
        return (a.astype("u8") << start & ones | b & ~ones).astype("u4")

    return elementwise(op, "u32", "u32", "u32", "u32", "u32", function=inserted)


# ---------------------------------------------------------------------------------- floating point
_FLOAT = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


@instruction(r"(?:(add|sub|mul)(?:\.rn)?|(div)\.rn)\.f32")
def _float(op, *names):
    return elementwise(op, "f32", "f32", "f32", function=_FLOAT[names[0] or names[1]])


@instruction(r"(rcp|sqrt)\.rn\.f32")
def _rounded(op, name):
    function = np.sqrt if name == "sqrt" else lambda a: np.float32(1) / a
    return elementwise(op, "f32", "f32", function=function)


def _packed(op, dtype: str, function):
    """``function`` of both halves of words."""

    def run(a, b):
        a, b = (np.ascontiguousarray(x) for x in np.broadcast_arrays(a, b))
        return function(a.view(TYPES[dtype]), b.view(TYPES[dtype])).view("u4")

    return elementwise(op, "u32", "u32", "u32", function=run)


@instruction(r"(add|sub|mul)\.rn\.f16x2")
def _halves(op, name):
    # In FP32 and rounded again, which for one operation is the rounding to FP16.
    return _packed(op, "f16", _FLOAT[name])


@instruction(r"fma\.rn\.f16x2")
def _fused_halves(op):
    # FP64 holds product and sum wherever they are near a tie of FP16.
    def run(*halves):
        a, b, c = (np.ascontiguousarray(x).view("f2") for x in np.broadcast_arrays(*halves))
        return np.asarray(a.astype("f8") * b + c).astype("f2").view("u4")

    return elementwise(op, "u32", "u32", "u32", "u32", function=run)


@instruction(r"fma\.rn\.f32")
def _fused(op):
    return elementwise(op, "f32", "f32", "f32", "f32", function=fused)


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
    return total.astype("f4")


_EXTREMES = {
    ("min", None): np.fmin,
    ("max", None): np.fmax,
    ("min", ".NaN"): np.minimum,
    ("max", ".NaN"): np.maximum,
}


def _extreme(name, keeps_nan):
    """Minimum or maximum, with minus zero below zero."""

    def run(a, b):
        result = _EXTREMES[name, keeps_nan](a, b)
        zero = result == 0
        if zero.any():
            sign = np.logical_or if name == "min" else np.logical_and
            # Among numbers of unequal sign, only zeros can give a zero of the wrong sign.
            negative = sign(np.signbit(a) & (a == 0), np.signbit(b) & (b == 0))
            signed = np.where(negative, -np.zeros_like(result), np.zeros_like(result))
            result = np.where(zero & (a == b), signed, result)
        return result

    return run


@instruction(r"(min|max)(\.NaN)?\.f32")
def _float_extreme(op, *which):
    return elementwise(op, "f32", "f32", "f32", function=_extreme(*which))


@instruction(r"(min|max)(\.NaN)\.(f16|bf16)x2")
def _packed_extreme(op, name, keeps_nan, dtype):
    return _packed(op, dtype, _extreme(name, keeps_nan))


@instruction(r"(neg|abs)\.f32")
def _float_sign(op, name):
    return elementwise(op, "f32", "f32", function=np.negative if name == "neg" else np.abs)


@instruction(r"copysign\.f32")
def _copy_sign(op):
    return elementwise(op, "f32", "f32", "f32", function=lambda sign, x: np.copysign(x, sign))


def _flushed(x):
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


_APPROXIMATED = {"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal}


@instruction(r"(ex2|lg2|rcp)\.approx\.ftz\.f32")
def _approximate(op, name):
    # The exact value rounded, which is within the documented errors: 2^-22 of 2^x, for the
    # logarithm 2^-22 absolute or relative, and 1 in the last place of 1/x.
    exact = _APPROXIMATED[name]

    def run(a):
        return _flushed(exact(_flushed(a).astype("f8")).astype("f4"))

    return elementwise(op, "f32", "f32", function=run)


# ------------------------------------------------------------------------------- choices and moves
_ORDER = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_COMBINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.not_equal}


@instruction(
    r"setp\.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(and|or|xor))?\.([bus]\d+|f32)"
)
def _compare(op, comparison, combine, dtype):
    d, a, b, *c = op.operands
    pair = d if isinstance(d, Pair) else Pair(d, None)
    put, other = op.write(pair.first, "pred"), op.write(pair.second, "pred")
    a, b = op.read(a, dtype), op.read(b, dtype)
    third = op.read(c[0], "pred") if combine else None
    compare = _compare_floats(comparison) if dtype == "f32" else _ORDER[comparison]

    def run(m):
        result = compare(a(m), b(m))
        opposite = ~result
        if combine:
            result, opposite = (_COMBINED[combine](x, third(m)) for x in (result, opposite))
        put(m, result)
        other(m, opposite)

    return run


def _compare_floats(name: str):
    """With a NaN false, or true for names that end in u."""
    if name in ("neu", "eq", "lt", "le", "gt", "ge"):  # as NumPy has it
        return _ORDER[name[:2]]
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    order = _ORDER.get(name[:2], np.not_equal)  # of nan: any that is false without one
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    return lambda a, b: order(a, b) | np.isnan(a) | np.isnan(b)


@instruction(r"selp\.([busf]\d+)")
def _select(op, dtype):
    return elementwise(op, dtype, dtype, dtype, "pred", function=lambda a, b, p: np.where(p, a, b))


@instruction(r"(?:mov|cvta\.to\.global)\.([busf]\d+|pred)")
def _move(op, dtype):
    d, a = op.operands
    if isinstance(d, Vector):
        return _unpack(op, d.parts, a, dtype)
    if isinstance(a, Vector):
        return _pack(op, d, a.parts, dtype)
    return elementwise(op, dtype, dtype, function=lambda a: a)


def _unpack(op, parts, a, dtype):
    size = TYPES[dtype].itemsize // len(parts)
    puts, a = [op.write(part, f"b{8 * size}") for part in parts], op.read(a, dtype)

    def run(m):
        word = a(m)
        for i, put in enumerate(puts):
            put(m, (word >> word.dtype.type(8 * size * i)).astype(f"u{size}"))

    return run


def _pack(op, d, parts, dtype):
    size = TYPES[dtype].itemsize // len(parts)
    put, parts = op.write(d, dtype), [op.read(part, f"b{8 * size}") for part in parts]
    wide = TYPES[f"b{8 * size * len(parts)}"]

    def run(m):
        result = wide.type(0)
        for i, part in enumerate(parts):
            result = result | part(m).astype(wide) << wide.type(8 * size * i)
        put(m, result)

    return run
