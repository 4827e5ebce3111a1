"""Which Python function an instruction becomes, and how it reads and writes registers.

Registers are arrays [warps, 32] of unsigned integers, predicates of bool, replaced as a whole when
they are written. See docs/ptx-interpreter.md on how to add an instruction.
"""

import re
from collections.abc import Callable
from functools import cache, partial

import ml_dtypes
import numpy as np

from .ptx import Address, Instruction, KernelError, Register

TYPES = {
    **{f"{kind}{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8) for kind in "bu"},
    **{f"s{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"f{8 * n}": np.dtype(f"f{n}") for n in (2, 4)},
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e2m1": np.dtype(ml_dtypes.float4_e2m1fn),  # a byte each, of which the lower half counts
    "pred": np.dtype(bool),
}

Run = Callable[..., None]  # of a machine
_BUILDERS: list[tuple[re.Pattern, Callable[..., Run]]] = []


# ---------------------------------------------------------------------------------------- operands
def read(operand, dtype: str) -> Callable:
    """A function of the machine: ``operand`` as ``dtype``, [warps, 32] or a scalar."""
    kind = TYPES[dtype]
    if type(operand) is tuple:
        parts = read_parts(operand, f"b{8 * kind.itemsize // len(operand)}")
        return lambda m: m.spread(parts(m).view(kind)[:, 0])
    if isinstance(operand, int):
        bits = operand != 0 if dtype == "pred" else operand % 2 ** (8 * kind.itemsize)
        value = np.array(bits, f"u{kind.itemsize}").view(kind)[()]
        return lambda m: value
    if not isinstance(operand, Register):
        raise KernelError(f"unknown register {operand}")
    index, stored, negated = operand
    if negated:
        return lambda m: ~m.registers[index]
    if kind == stored:
        return lambda m: m.registers[index]
    if kind.itemsize > stored.itemsize:
        raise KernelError(f"a register of {stored.itemsize} bytes is read as {dtype}")
    narrow = f"u{kind.itemsize}"
    return lambda m: m.registers[index].astype(narrow, copy=False).view(kind)


def write(operand, dtype: str) -> Callable:
    """A function of the machine and a value that puts it, as ``dtype``, where lanes are active."""
    if operand is None:
        return lambda m, value: None
    kind = TYPES[dtype]
    if type(operand) is tuple:
        part = f"b{8 * kind.itemsize // len(operand)}"
        put_parts = write_parts(operand, part)
        return lambda m, word: put_parts(m, m.active(word)[:, None].view(TYPES[part]))
    index, stored, _ = operand
    wide = f"{kind.kind}{stored.itemsize}" if kind.itemsize < stored.itemsize else kind

    def put(m, value):
        if value.dtype != kind:
            value = value.astype(kind)
        if kind != stored:
            value = value.astype(wide, copy=False).view(stored)
        if not m.everyone:
            value = np.where(m.mask, value, m.registers[index])
        elif value.shape != m.shape:
            value = np.broadcast_to(value, m.shape)
        m.registers[index] = value

    return put


def parts_of(operand) -> tuple:
    """What is in braces or on both sides of "|"; otherwise the operand on its own."""
    return operand if type(operand) is tuple else (operand,)


def read_parts(operand, dtype: str) -> Callable:
    """A function of the machine: the operand's parts in active lanes, [lanes, parts]."""
    reads = [read(part, dtype) for part in parts_of(operand)]
    return lambda m: np.stack([m.active(x(m)) for x in reads], -1)


def write_parts(operand, dtype: str) -> Callable:
    """A function of the machine and of values [lanes, parts] for active lanes."""
    puts = [write(part, dtype) for part in parts_of(operand)]

    def put_all(m, values):
        for put, column in zip(puts, np.ascontiguousarray(values.T), strict=True):
            put(m, m.spread(column))

    return put_all


def address(operand: Address) -> Callable:
    """A function of the machine: of whatever space, in as many bits as its register has."""
    base = operand.base
    bits = 8 * base.stored.itemsize if isinstance(base, Register) else 64
    at, offset = read(base, f"u{bits}"), read(operand.offset, f"u{bits}")
    return at if not operand.offset else lambda m: at(m) + offset(m)


# ------------------------------------------------------------------------------------ instructions
def instruction(pattern: str):
    """Register a builder: of the pattern's groups, then the operands, it makes a Run."""

    def register(builder):
        _BUILDERS.append((re.compile(pattern), builder))
        return builder

    return register


def lanewise(pattern: str, types: str, function: Callable | dict[str, Callable]) -> None:
    """Register an instruction whose result depends on its own lane only.

    types: of the operands; a number stands for that group of the pattern, "+" doubles its bits.
    function: of the sources; of several, the one for the pattern's first group.
    """
    count = re.compile(pattern).groups

    def resolved(kind, groups):
        name = groups[int(kind[-1])] if kind.lstrip("+").isdigit() else kind
        return f"{name[0]}{2 * int(name[1:])}" if kind[0] == "+" else name

    @instruction(pattern)
    def build(*arguments):
        groups, operands = arguments[:count], arguments[count:]
        kinds = [resolved(kind, groups) for kind in types.split()]
        if len(operands) != len(kinds):
            raise KernelError(f"{len(operands)} operands, {len(kinds)} are understood")
        put, reads = write(operands[0], kinds[0]), list(map(read, operands[1:], kinds[1:]))
        chosen = function[groups[0]] if isinstance(function, dict) else function
        return lambda m: put(m, chosen(*[x(m) for x in reads]))


def by_lane(pattern: str, kinds: str, function: Callable) -> None:
    """Register what lanes do one after the other: ``function`` of the machine, warp and integers.

    kinds: of the operands; "[]" is an address, "_" is left alone, "=" gets what it answers.
    """

    @instruction(pattern)
    def build(*operands):
        pairs = list(zip(kinds.split(), operands, strict=True))
        puts = [write(x, kind[1:]) for kind, x in pairs if kind[0] == "="]
        reads = [
            address(x) if kind == "[]" else read(x, kind)
            for kind, x in pairs
            if kind[0] not in "=_"
        ]

        def run(m):
            values = [np.broadcast_to(x(m), m.shape) for x in reads]
            results = np.zeros(m.shape, bool)
            for warp, lane in np.argwhere(m.mask):
                results[warp, lane] = function(m, warp, *(int(x[warp, lane]) for x in values))
            for put in puts:
                put(m, results)

        return run


@cache
def _find(opcode: str) -> Callable[..., Run]:
    for pattern, builder in _BUILDERS:
        if found := pattern.fullmatch(opcode):
            return partial(builder, *found.groups())
    raise KernelError(f"unknown instruction {opcode}")


def decode(what: Instruction) -> Run:
    """The function that runs ``what`` on a machine."""
    try:
        run = _find(what.opcode)(*what.operands)
        guard = what.guard and read(what.guard, "pred")
    except (KernelError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise KernelError(f"{what}: {error}") from error

    def guarded(m):
        with m.exactly(m.mask & guard(m)):
            if m.mask.any():
                run(m)

    return guarded if guard else run
