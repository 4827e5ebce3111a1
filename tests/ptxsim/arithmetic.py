"""Arithmetic, logic, comparisons and moves. NaNs are NaN; their payloads are not modelled."""

import numpy as np

from .decode import TYPES, Op, instruction
from .ptx import Fault, Immediate, Pair, Vector

_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_SMALLEST_NORMAL = np.float32(2.0**-126)


def binary(op: Op, dtype: str, function):
    d, a, b = op.operands
    put, a, b = op.write(d, dtype), op.read(a, dtype), op.read(b, dtype)
    return lambda m: put(m, function(a(m), b(m)))


def unary(op: Op, dtype: str, function):
    d, a = op.operands
    put, a = op.write(d, dtype), op.read(a, dtype)
    return lambda m: put(m, function(a(m)))


# ---------------------------------------------------------------------------------------- integers
@instruction(r"(add|sub|mul\.lo|and|or|xor)\.([busx]\d+)")
def _integer(op, name, dtype):
    functions = {"add": np.add, "sub": np.subtract, "mul.lo": np.multiply}
    functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return binary(op, dtype, functions[name])


@instruction(r"(and|or|xor)\.pred")
def _predicates(op, name):
    return binary(
        op, "pred", {"and": np.logical_and, "or": np.logical_or, "xor": np.not_equal}[name]
    )


@instruction(r"not\.(pred|b\d+)")
def _not(op, dtype):
    return unary(op, dtype, np.invert)


@instruction(r"(neg|abs)\.(s\d+)")
def _sign(op, name, dtype):
    return unary(op, dtype, np.negative if name == "neg" else np.abs)


@instruction(r"(min|max)(\.relu)?\.([us]\d+)")
def _integer_extreme(op, name, relu, dtype):
    function = np.minimum if name == "min" else np.maximum
    if relu:
        return binary(op, dtype, lambda a, b: np.maximum(function(a, b), TYPES[dtype].type(0)))
    return binary(op, dtype, function)


@instruction(r"(mul|mad)\.wide\.([us](?:16|32))")
def _wide(op, name, dtype):
    d, a, b, *c = op.operands
    wide = TYPES[_WIDE[dtype]]
    put, a, b = op.write(d, wide), op.read(a, dtype), op.read(b, dtype)
    if name == "mul":
        return lambda m: put(m, np.multiply(a(m), b(m), dtype=wide))
    c = op.read(c[0], wide)
    return lambda m: put(m, np.multiply(a(m), b(m), dtype=wide) + c(m))


@instruction(r"mul\.hi\.([us])(16|32)")
def _high(op, kind, bits):
    dtype, shift = TYPES[kind + bits], int(bits)
    wide = TYPES[_WIDE[kind + bits]]
    return binary(op, dtype, lambda a, b: (np.multiply(a, b, dtype=wide) >> shift).astype(dtype))


@instruction(r"mad\.lo\.([us]\d+)")
def _mad(op, dtype):
    d, a, b, c = op.operands
    put, a, b, c = op.write(d, dtype), *(op.read(x, dtype) for x in (a, b, c))
    return lambda m: put(m, a(m) * b(m) + c(m))


@instruction(r"(div|rem)\.([us]\d+)")
def _divide(op, name, dtype):
    d, a, b = op.operands
    put, a, b = op.write(d, dtype), op.read(a, dtype), op.read(b, dtype)
    one = TYPES[dtype].type(1)

    def run(m):
        x, y = a(m), b(m)
        if (m.mask & (y == 0)).any():
            raise Fault("division by zero")
        y = np.where(y == 0, one, y)
        quotient = x // y
        rest = x - quotient * y
        # NumPy rounds down, PTX towards zero.
        down = (rest != 0) & ((x < 0) != (y < 0))
        quotient = quotient + down.astype(quotient.dtype)
        put(m, quotient if name == "div" else x - quotient * y)

    return run


@instruction(r"(shl|shr)\.([bus])(16|32|64)")
def _shift(op, name, kind, bits):
    """Shifts of more than all bits shift all of them out."""
    d, a, b = op.operands
    dtype = TYPES[kind + bits]
    put, a, amount = op.write(d, dtype), op.read(a, dtype), op.read(b, "u32")
    most = int(bits) - 1
    shift = np.left_shift if name == "shl" else np.right_shift
    if kind == "s" and name == "shr":
        return lambda m: put(m, shift(a(m), np.minimum(amount(m), most).astype(dtype)))
    if isinstance(b, Immediate) and b.bits <= most:
        by = dtype.type(b.bits)
        return lambda m: put(m, shift(a(m), by))
    zero = dtype.type(0)
    return lambda m: put(
        m, np.where(amount(m) > most, zero, shift(a(m), np.minimum(amount(m), most).astype(dtype)))
    )


@instruction(r"prmt\.b32")
def _permute(op):
    d, a, b, c = op.operands
    put, a, b, c = op.write(d, "u32"), *(op.read(x, "u32") for x in (a, b, c))

    def run(m):
        both = b(m).astype("u8") << np.uint64(32) | a(m)
        choices, result = c(m), np.uint32(0)
        for i in range(4):
            choice = (choices >> np.uint32(4 * i)) & np.uint32(15)
            byte = (both >> ((choice & 7) * 8).astype("u8")).astype("u4") & np.uint32(255)
            sign = np.where(byte & 128, np.uint32(255), np.uint32(0))
            result = result | np.where(choice & 8, sign, byte) << np.uint32(8 * i)
        put(m, result)

    return run


@instruction(r"dp4a\.([us])32\.([us])32")
def _dot_of_bytes(op, kind_a, kind_b):
    d, a, b, c = op.operands
    put, a, b, c = op.write(d, "u32"), *(op.read(x, "u32") for x in (a, b, c))

    def bytes_of(word, kind):
        word = np.ascontiguousarray(word)[..., None]
        return word.view("i1" if kind == "s" else "u1").astype("i4")

    return lambda m: put(
        m, ((bytes_of(a(m), kind_a) * bytes_of(b(m), kind_b)).sum(-1, dtype="i4").view("u4") + c(m))
    )


@instruction(r"popc\.b32")
def _population(op):
    return unary(op, "u32", lambda a: np.bitwise_count(a).astype("u4"))


@instruction(r"bfi\.b32")
def _insert(op):
    d, a, b, c, length = op.operands
    put, (a, b, c, length) = op.write(d, "u32"), (op.read(x, "u32") for x in (a, b, c, length))

    def run(m):
        start, count = (np.asarray(x(m), "u8") & np.uint64(255) for x in (c, length))
        ones = ((np.uint64(1) << np.minimum(count, 32)) - np.uint64(1)) << np.minimum(start, 32)
        shifted = a(m).astype("u8") << np.minimum(start, 32)
        put(m, (shifted & ones | b(m) & ~ones).astype("u4"))

    return run


# ---------------------------------------------------------------------------------- floating point
@instruction(r"(add|sub|mul)(?:\.rn)?\.f32")
def _float(op, name):
    return binary(op, "f32", {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name])


@instruction(r"(add|sub|mul)\.rn\.f16x2")
def _halves(op, name):
    # In FP32 and rounded again, which for one operation is the rounding to FP16.
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    return _packed(op, "f16", function)


def _packed(op: Op, dtype: str, function):
    d, a, b = op.operands
    put, a, b = op.write(d, "u32"), op.read(a, "u32"), op.read(b, "u32")

    def run(m):
        x, y = (np.broadcast_to(v(m), m.shape).copy().view(TYPES[dtype]) for v in (a, b))
        put(m, function(x, y).view("u4"))

    return run


@instruction(r"(div|rcp|sqrt)\.rn\.f32")
def _rounded(op, name):
    if name == "div":
        return binary(op, "f32", np.divide)
    return unary(op, "f32", np.sqrt if name == "sqrt" else lambda a: np.float32(1) / a)


@instruction(r"fma\.rn\.f32")
def _fused(op):
    d, a, b, c = op.operands
    put, a, b, c = op.write(d, "f32"), *(op.read(x, "f32") for x in (a, b, c))
    return lambda m: put(m, fused(a(m), b(m), c(m)))


def fused(a, b, c):
    """a * b + c in FP32, rounded once."""
    product = np.multiply(a, b, dtype="f8")  # exact
    total = product + c
    # Rounded to FP64 and then to FP32: wrong only if the first rounding made a tie of it, or if the
    # result has fewer bits than a normal number. Where either may be, round the first to odd.
    risky = (np.atleast_1d(total).view("u8") & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    if risky.any() or (np.abs(total) < _SMALLEST_NORMAL).any():
        part = total - product
        error = (product - (total - part)) + (c - part)
        bits = np.atleast_1d(total).view("u8").reshape(np.shape(total))
        to_odd = (error != 0) & np.isfinite(total) & (bits & np.uint64(1) == 0)
        toward = np.where(error > 0, np.inf, -np.inf)
        total = np.where(to_odd, np.nextafter(total, toward), total)
    return total.astype("f4")


@instruction(r"(min|max)(\.NaN)?\.f32")
def _float_extreme(op, name, keeps_nan):
    if keeps_nan:
        return binary(op, "f32", _ordered(np.minimum if name == "min" else np.maximum, name))
    return binary(op, "f32", _ordered(np.fmin if name == "min" else np.fmax, name))


@instruction(r"(min|max)\.NaN\.(f16|bf16)x2")
def _packed_extreme(op, name, dtype):
    function = _ordered(np.minimum if name == "min" else np.maximum, name)
    return _packed(op, dtype, function)


def _ordered(function, name):
    """``function`` with minus zero below zero."""

    def run(a, b):
        result = function(a, b)
        zero = result == 0
        if zero.any():
            negative = np.signbit(a) & np.signbit(b)
            if name == "min":
                negative = (np.signbit(a) & (a == 0)) | (np.signbit(b) & (b == 0))
            signed = np.where(negative, -np.zeros_like(result), np.zeros_like(result))
            result = np.where(zero, signed, result)
        return result

    return run


@instruction(r"(neg|abs)\.f32")
def _float_sign(op, name):
    return unary(op, "f32", np.negative if name == "neg" else np.abs)


@instruction(r"copysign\.f32")
def _copy_sign(op):
    return binary(op, "f32", lambda sign, size: np.copysign(size, sign))


def _flushed(x):
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


@instruction(r"(ex2|lg2)\.approx\.ftz\.f32")
def _approximate(op, name):
    # The exact value rounded, which is within the documented errors: 2^-22 of 2^x, and for the
    # logarithm 2^-22 absolute or relative.
    function = np.exp2 if name == "ex2" else np.log2
    return unary(op, "f32", lambda a: _flushed(function(_flushed(a).astype("f8")).astype("f4")))


# ------------------------------------------------------------------------------- choices and moves
_COMPARISONS = {
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
    compare = _float_comparison(comparison) if dtype == "f32" else _COMPARISONS[comparison]

    def run(m):
        result = compare(a(m), b(m))
        opposite = ~result
        if combine:
            result, opposite = (_COMBINED[combine](x, third(m)) for x in (result, opposite))
        put(m, result)
        other(m, opposite)

    return run


def _float_comparison(name: str):
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name in ("neu", *_COMPARISONS):
        return _COMPARISONS[name[:2]]
    ordered = _COMPARISONS[name[:2]]
    return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)


@instruction(r"selp\.([busf]\d+)")
def _select(op, dtype):
    d, a, b, p = op.operands
    put, a, b, p = op.write(d, dtype), op.read(a, dtype), op.read(b, dtype), op.read(p, "pred")
    return lambda m: put(m, np.where(p(m), a(m), b(m)))


@instruction(r"(?:mov|cvta\.to\.global)\.([busf]\d+|pred)")
def _move(op, dtype):
    d, a = op.operands
    if isinstance(d, Vector):
        return _unpack(op, d.parts, a, dtype)
    if isinstance(a, Vector):
        return _pack(op, d, a.parts, dtype)
    return unary(op, dtype, lambda a: a)


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
