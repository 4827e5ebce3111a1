"""Basic blocks, and which of them every way to the end leads through: their post-dominators."""

from dataclasses import dataclass
from functools import reduce
from operator import and_

from .ptx import Instruction, KernelError, Program

EXIT = -1  # behind every block


@dataclass
class Block:
    instructions: list[Instruction]
    last: str  # "bra", "exit", "bar" or "" for one that falls through
    target: int  # of the branch
    following: int
    ahead: int = 0  # blocks that all lanes here will come to, as bits


def cut(program: Program) -> list[Block]:
    """The blocks of ``program``, in the order of its text. A barrier ends a block."""
    instructions = program.instructions
    ends = {i + 1 for i, x in enumerate(instructions) if _ending(x)}
    starts = sorted({0, *program.labels.values(), *ends} - {len(instructions)})
    number = {start: i for i, start in enumerate(starts)}
    number[len(instructions)] = EXIT
    blocks = []
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else len(instructions)
        last = instructions[end - 1]
        kind, target = _ending(last), EXIT
        if kind == "bra":
            if last.operands[0] not in program.labels:
                raise KernelError(f"{last}: no label {last.operands[0]}")
            target = number[program.labels[last.operands[0]]]
        blocks.append(Block(instructions[start:end], kind, target, number[end]))
    _look_ahead(blocks)
    return blocks


def _ending(instruction: Instruction) -> str:
    root = instruction.opcode.split(".")[0]
    if root == "bar" and instruction.opcode != "bar.warp.sync":
        return "bar"
    return {"bra": "bra", "ret": "exit", "exit": "exit", "barrier": "bar"}.get(root, "")


def _successors(block: Block) -> list[int]:
    always = block.instructions[-1].guard is None
    if block.last == "bra":
        return [block.target] if always else [block.target, block.following]
    if block.last == "exit":
        return [EXIT] if always else [EXIT, block.following]
    return [block.following]


def _look_ahead(blocks: list[Block]) -> None:
    sets, before = [(1 << len(blocks)) - 1] * len(blocks) + [0], None  # the last one: EXIT
    while sets != before:
        before = sets.copy()
        for i in reversed(range(len(blocks))):
            sets[i] = reduce(and_, (sets[x] for x in _successors(blocks[i]))) | 1 << i
    for i, block in enumerate(blocks):
        block.ahead = sets[i] & ~(1 << i)
