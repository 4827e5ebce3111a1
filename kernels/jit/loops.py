"""The hot loop of a kernel's machine code: what a warp issues to go once around it.

Static counts of a whole kernel say little about an attention kernel, which spends its time in one
loop with branches around what is seldom needed. Here it is walked: of all ways around the loop that
leave out no matrix product, the shortest.
"""

import re
from collections import Counter
from typing import NamedTuple

from .sass import Instruction, is_tensor

_TARGET = re.compile(r"0x[0-9a-f]+$")
_INSTRUCTION_BYTES = 16  # on every GPU since compute capability 7.0


class _Way(NamedTuple):
    """A way from the head of a loop to an instruction, that one included."""

    tensor: int
    length: int
    previous: int | None

    @property
    def merit(self) -> tuple[int, int]:
        return self.tensor, -self.length


def count_hot_loop(code: list[Instruction]) -> Counter[str]:
    """Opcodes issued in one turn of the loop with most matrix products; empty if there is none.

    NOPs count: they take issue slots as any other. Loops within the loop are passed once.
    """
    for head, end in _loops(code):
        ways = _ways(code, head, end)
        if end in ways:
            counts: Counter[str] = Counter()
            index = end
            while index is not None:
                counts[code[index].opcode] += 1
                index = ways[index].previous
            return counts
    return Counter()


def _loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """(first, last) instruction of each loop with matrix products: most first, then shortest.

    There may be some that no way leads around: a wait that spins behind the kernel's end branches
    back into the middle of a loop.
    """
    found = []
    for index in range(len(code)):
        target = _target(code[index])
        if target is not None and target <= index:
            body = code[target : index + 1]
            found.append((-sum(map(is_tensor, body)), len(body), target, index))
    return [(head, end) for products, _, head, end in sorted(found) if products]


def _ways(code: list[Instruction], head: int, end: int) -> dict[int, _Way]:
    """The best way from ``head`` to each instruction up to ``end`` that one leads to."""
    ways: dict[int, _Way] = {}
    _reach(ways, code, head, None)
    for index in range(head, end):
        if index in ways:
            for following in _successors(code, index):
                if index < following <= end:
                    _reach(ways, code, following, index)
    return ways


def _reach(ways: dict[int, _Way], code: list[Instruction], index: int, previous: int | None):
    before = ways[previous] if previous is not None else _Way(0, 0, None)
    way = _Way(before.tensor + is_tensor(code[index]), before.length + 1, previous)
    if index not in ways or way.merit > ways[index].merit:
        ways[index] = way


def _successors(code: list[Instruction], index: int) -> list[int]:
    instruction = code[index]
    target = _target(instruction)
    always = not instruction.predicate and "," not in instruction.operands
    if instruction.opcode == "EXIT" and always:
        return []
    if target is None:
        return [index + 1]
    return [target] if always else [index + 1, target]


def _target(instruction: Instruction) -> int | None:
    """Index of the instruction that a branch leads to."""
    if instruction.opcode.split(".")[0] != "BRA":
        return None
    found = _TARGET.search(instruction.operands)
    return int(found[0], 16) // _INSTRUCTION_BYTES if found else None
