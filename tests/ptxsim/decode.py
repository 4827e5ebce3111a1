"""Which Python function an instruction becomes, and how it reads and writes registers.

Registers are arrays [warps, 32] of unsigned integers, predicates of bool, replaced as a whole when
they are written. See docs/ptx-interpreter.md on how to add an instruction.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache

import ml_dtypes
import numpy as np

from .ptx import Address, Instruction, KernelError, Negated, Register

TYPES = {
    **{f"{kind}{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8) for kind in "bu"},
    **{f"s{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"f{8 * n}": np.dtype(f"f{n}") for n in (2, 4)},
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "pred": np.dtype(bool),
}
_STORED = {0: np.dtype(bool), **{n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}}

Run = Callable[..., None]  # of a machine
_BUILDERS: list[tuple[re.Pattern, Callable[..., Run]]] = []


class Op:
    """An instruction on its way to a function: its operands as readers and writers."""

    def __init__(self, instruction: Instruction):
        self.operands = instruction.operands

    def read(self, operand, dtype: str | np.dtype) -> Callable:
        """A function of the machine: ``operand`` as ``dtype``, [warps, 32] or a scalar."""
        dtype = TYPES.get(dtype, dtype)
        if isinstance(operand, Register):
            return _register_reader(operand, dtype)
        if isinstance(operand, Negated):
            inner = self.read(operand.register, dtype)
            return lambda m: ~inner(m)
        if isinstance(operand, str) and operand.startswith("%"):
            return lambda m: m.special(operand).astype(dtype)
        if not isinstance(operand, int):
            raise KernelError(f"{operand} cannot be read here")
        bits = operand % 2 ** (8 * dtype.itemsize)
        value = np.bool_(operand) if dtype.kind == "b" else _of_bits(bits, dtype)
        return lambda m: value

    def write(self, operand, dtype: str | np.dtype) -> Callable:
        """A function of the machine and a value that puts it where lanes are active."""
        dtype = TYPES.get(dtype, dtype)
        if operand is None:
            return lambda m, value: None
        index, stored = operand.index, _STORED[operand.bytes]
        wide = dtype.itemsize < stored.itemsize
        extended = (
            np.dtype(f"{dtype.kind}{stored.itemsize}") if wide and dtype.kind in "iu" else stored
        )

        def put(m, value):
            if wide:
                value = value.astype(extended)
            if value.dtype != stored:
                value = value.view(stored)
            if not m.everyone:
                value = np.where(m.mask, value, m.registers[index])
            elif value.shape != m.shape:
                value = np.broadcast_to(value, m.shape)
            m.registers[index] = value

        return put

    def address(self, operand: Address) -> Callable:
        """Of whatever space, in as many bits as its register has."""
        base, bits = operand.base, 64
        if isinstance(base, Register):
            bits = 8 * base.bytes
        read, offset = self.read(base, f"u{bits}"), TYPES[f"u{bits}"].type(operand.offset % 2**bits)
        return read if not operand.offset else lambda m: read(m) + offset


def parts_of(operand) -> tuple:
    """What is in braces or on both sides of "|"; otherwise the operand on its own."""
    return operand if type(operand) is tuple else (operand,)


def _of_bits(bits: int, dtype: np.dtype):
    return np.array(bits, _STORED[dtype.itemsize]).view(dtype)[()]


def elementwise(op: Op, types: Sequence[str], function, *, of_machine=False) -> Run:
    """The first operand becomes ``function`` of the others, a value of the first of ``types``.

    of_machine: the function wants the machine too, before them.
    """
    if len(op.operands) != len(types):
        raise KernelError(f"{len(op.operands)} operands, {len(types)} are understood")
    put, to = op.write(op.operands[0], types[0]), TYPES[types[0]]
    reads = [op.read(*pair) for pair in zip(op.operands[1:], types[1:], strict=True)]

    def run(m):
        values = [read(m) for read in reads]
        value = function(m, *values) if of_machine else function(*values)
        put(m, value if value.dtype == to else value.astype(to))

    return run


def _register_reader(register: Register, dtype: np.dtype) -> Callable:
    index, stored = register.index, _STORED[register.bytes]
    if dtype == stored:
        return lambda m: m.registers[index]
    if dtype.itemsize == stored.itemsize:
        return lambda m: m.registers[index].view(dtype)
    if dtype.itemsize > stored.itemsize:
        raise KernelError(f"a register of {stored.itemsize} bytes is read as {dtype}")
    narrow = _STORED[dtype.itemsize]
    return lambda m: m.registers[index].astype(narrow).view(dtype)


def instruction(pattern: str):
    """Register a builder: a function of an Op and the pattern's groups that gives a Run."""

    def register(builder):
        _BUILDERS.append((re.compile(pattern), builder))
        return builder

    return register


def lanewise(pattern: str, types: str, function: Callable | dict[str, Callable]) -> None:
    """Register an instruction whose result depends on its own lane only.

    types: of the operands; a number stands for that group of the pattern, "+" doubles its bits.
    function: of the sources; of several, the one for the pattern's first group.
    """

    def resolved(kind, groups):
        name = groups[int(kind[-1])] if kind.lstrip("+").isdigit() else kind
        return f"{name[0]}{2 * int(name[1:])}" if kind[0] == "+" else name

    @instruction(pattern)
    def build(op, *groups):
        chosen = function[groups[0]] if isinstance(function, dict) else function
        return elementwise(op, [resolved(kind, groups) for kind in types.split()], chosen)


@cache
def _find(opcode: str):
    for pattern, builder in _BUILDERS:
        found = pattern.fullmatch(opcode)
        if found:
            return builder, found.groups()
    return None


def check_known(what: Instruction) -> None:
    if not _find(what.opcode):
        raise KernelError(f"{what}: unknown instruction {what.opcode}")


def decode(what: Instruction) -> Run:
    """The function that runs ``what``, which is known, on a machine."""
    builder, groups = _find(what.opcode)
    try:
        run = builder(Op(what), *groups)
    except (KernelError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise KernelError(f"{what}: {error}") from error
    if what.guard is None or what.opcode.startswith(("bra", "exit", "ret")):
        return run
    guard = Op(what).read(what.guard, "pred")

    def guarded(m):
        with m.only(guard(m)):
            run(m)

    return guarded
