"""Basic blocks, and which of them every way to the end leads through: their post-dominators."""

import re
from dataclasses import dataclass
from functools import reduce
from operator import and_

from .ptx import Instruction, KernelError, Program

EXIT = -1  # behind every block
_BRANCH = re.compile(r"(?:bra|ret|exit)\b")
_END = re.compile(rf"{_BRANCH.pattern}|barrier\.|bar\.(?!warp)")  # of a block


@dataclass
class Block:
    instructions: list[Instruction]  # the last one may be a branch
    target: int  # of the branch
    following: int
    ahead: int = 0  # blocks that all lanes here will come to, as bits

    def successors(self) -> list[int]:
        last = self.instructions[-1]
        if not _BRANCH.match(last.opcode):
            return [self.following]
        return [self.target] if last.guard is None else [self.target, self.following]


def cut(program: Program) -> list[Block]:
    """The blocks of ``program``, in the order of its text."""
    instructions = program.instructions
    ends = {i + 1 for i, x in enumerate(instructions) if _END.match(x.opcode)}
    starts = sorted({0, *program.labels.values(), *ends} - {len(instructions)})
    number = {start: i for i, start in enumerate(starts)} | {len(instructions): EXIT}
    blocks = []
    for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
        last, target = instructions[end - 1], EXIT
        if last.opcode.startswith("bra"):
            if last.operands[0] not in program.labels:
                raise KernelError(f"{last}: no label {last.operands[0]}")
            target = number[program.labels[last.operands[0]]]
        blocks.append(Block(instructions[start:end], target, number[end]))
    _look_ahead(blocks)
    return blocks


def _look_ahead(blocks: list[Block]) -> None:
    sets, before = [(1 << len(blocks)) - 1] * len(blocks) + [0], None  # the last one: EXIT
    while sets != before:
        before = sets.copy()
        for i in reversed(range(len(blocks))):
            sets[i] = reduce(and_, (sets[x] for x in blocks[i].successors())) | 1 << i
    for i, block in enumerate(blocks):
        block.ahead = sets[i] & ~(1 << i)
