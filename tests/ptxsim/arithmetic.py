"""Arithmetic, logic, comparisons and moves. NaNs are NaN; their payloads are not modelled."""

from functools import partial

import numpy as np

from .decode import TYPES, elementwise, instruction, lanewise, parts_of
from .ptx import KernelError

_SMALLEST_NORMAL = np.float32(2.0**-126)


# ---------------------------------------------------------------------------------------- integers
def _product(a, b):
    """With twice the bits."""
    return np.multiply(a, b, dtype=f"{a.dtype.kind}{2 * a.dtype.itemsize}")


def _high(a, b):
    return _product(a, b) >> 8 * a.dtype.itemsize


def _high_of_64(a, b):
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, a_low, b, b_low = a >> half, a & low, b >> half, b & low
    middle = a * b_low + (a_low * b_low >> half)
    return a * b + (middle >> half) + (a_low * b + (middle & low) >> half)


def _shifted(shift, a, amount):
    """Shifts of more than all bits shift all of them out."""
    most = 8 * a.dtype.itemsize - 1
    result = shift(a, np.minimum(amount, most).astype(a.dtype))
    return result if a.dtype.kind == "i" else np.where(amount > most, a.dtype.type(0), result)


def _permuted(a, b, choices):
    both = b.astype("u8") << np.uint64(32) | a
    result = np.uint32(0)
    for i in range(4):
        choice = (choices >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> ((choice & 7) * 8).astype("u8")).astype("u4") & np.uint32(255)
        sign = np.where(byte & 128, np.uint32(255), np.uint32(0))
        result = result | np.where(choice & 8, sign, byte) << np.uint32(8 * i)
    return result


def _dot_of_bytes(a, b, c):
    a, b = (
        np.ascontiguousarray(x)[..., None].view(f"{x.dtype.kind}1").astype("i4") for x in (a, b)
    )
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
    "min.relu": lambda a, b: np.maximum(np.minimum(a, b), 0),
    "max.relu": lambda a, b: np.maximum(np.maximum(a, b), 0),
    "shl": partial(_shifted, np.left_shift),
    "shr": partial(_shifted, np.right_shift),
}
lanewise(r"(add|sub|mul\.lo|and|or|xor|min|max)\.([bus]\d+|pred)", "1 1 1", _INTEGER)
lanewise(r"((?:min|max)\.relu)\.(s32)", "1 1 1", _INTEGER)
lanewise(r"(not|neg|abs)\.([bs]\d+|pred)", "1 1", _INTEGER)
lanewise(r"(shl|shr)\.([bus](?:16|32|64))", "1 1 u32", _INTEGER)
lanewise(r"mul\.wide\.([us](?:16|32))", "+0 0 0", _product)
lanewise(r"mad\.wide\.([us](?:16|32))", "+0 0 0 +0", lambda a, b, c: _product(a, b) + c)
lanewise(r"mad\.lo\.([us]\d+)", "0 0 0 0", lambda a, b, c: a * b + c)
lanewise(r"mul\.hi\.([us](?:16|32))", "0 0 0", _high)
lanewise(r"mul\.hi\.u64", "u64 u64 u64", _high_of_64)
lanewise(r"prmt\.b32", "u32 u32 u32 u32", _permuted)
lanewise(r"dp4a\.([us]32)\.([us]32)", "u32 0 1 u32", _dot_of_bytes)
lanewise(r"popc\.b32", "u32 u32", np.bitwise_count)
lanewise(r"bfi\.b32", "u32 u32 u32 u32 u32", _inserted)


@instruction(r"(div|rem)\.([us]\d+)")
def _divide(op, name, dtype):
    def run(m, a, b):
        if (m.mask & (b == 0)).any():
            raise KernelError("division by zero")
        rest = np.fmod(a, b)  # has the sign of a, as in PTX
        return rest if name == "rem" else (a - rest) // b

    return elementwise(op, (dtype, dtype, dtype), run, of_machine=True)


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


def _in_halves(dtype: str, function):
    """``function`` of both halves of words."""

    def run(*words):
        words = (np.ascontiguousarray(x) for x in np.broadcast_arrays(*words))
        return np.asarray(function(*(x.view(TYPES[dtype]) for x in words))).view("u4")

    return run


def _fused_halves(a, b, c):
    # FP64 holds product and sum wherever they are near a tie of FP16.
    return (a.astype("f8") * b + c).astype("f2")


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
    _halves = {name: _in_halves(_type, function) for name, function in _FLOAT.items()}
    lanewise(rf"((?:min|max)\.NaN)\.{_type}x2", "u32 u32 u32", _halves)
    if _type == "f16":  # in FP32 and rounded again: for one operation the rounding to FP16
        lanewise(r"(add|sub|mul)\.rn\.f16x2", "u32 u32 u32", _halves)
        lanewise(r"fma\.rn\.f16x2", "u32 u32 u32 u32", _in_halves("f16", _fused_halves))


# ------------------------------------------------------------------------------- choices and moves
_ORDER = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_FLOAT_ORDER = _ORDER | {  # false with a NaN
    "ne": lambda a, b: (a < b) | (a > b),
    "num": lambda a, b: (a == a) & (b == b),
}
_OPPOSITE = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
for _name, _opposite in (_OPPOSITE | {"nan": "num"}).items():  # true with a NaN
    _FLOAT_ORDER[_name] = lambda a, b, f=_FLOAT_ORDER[_opposite]: ~f(a, b)
_COMBINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.not_equal}


@instruction(
    r"setp\.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(and|or|xor))?\.([bus]\d+|f32)"
)
def _compare(op, comparison, combine, dtype):
    d, a, b, *c = op.operands
    put, other = (op.write(x, "pred") for x in (*parts_of(d), None)[:2])
    a, b = op.read(a, dtype), op.read(b, dtype)
    third = op.read(c[0], "pred") if combine else None
    compare = (_FLOAT_ORDER if dtype == "f32" else _ORDER)[comparison]

    def run(m):
        result = compare(a(m), b(m))
        opposite = ~result
        if combine:
            result, opposite = (_COMBINED[combine](x, third(m)) for x in (result, opposite))
        put(m, result)
        other(m, opposite)

    return run


lanewise(r"selp\.([busf]\d+)", "0 0 0 pred", lambda a, b, p: np.where(p, a, b))


@instruction(r"(?:mov|cvta\.to\.global)\.([busf]\d+|pred)")
def _move(op, dtype):
    d, a = op.operands
    parts = max(parts_of(d), parts_of(a), key=len)
    if len(parts) == 1:
        return elementwise(op, (dtype, dtype), lambda a: a)
    size = TYPES[dtype].itemsize // len(parts)
    part = TYPES[f"b{8 * size}"]
    if parts_of(a) is a:
        put, reads = op.write(d, dtype), [op.read(x, part) for x in parts]

        def pack(m):
            values = [np.broadcast_to(read(m), m.shape) for read in reads]
            put(m, np.stack(values, -1).view(f"u{size * len(parts)}")[..., 0])

        return pack
    puts, read = [op.write(x, part) for x in parts], op.read(a, dtype)

    def unpack(m):
        word = read(m)
        for i, put in enumerate(puts):
            put(m, (word >> word.dtype.type(8 * size * i)).astype(part))

    return unpack
