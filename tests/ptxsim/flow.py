"""Basic blocks, and where lanes that a branch parts meet again: its immediate post-dominator."""

from dataclasses import dataclass

from .ptx import Instruction, KernelError, Program

EXIT = 1 << 30  # behind every block


@dataclass
class Block:
    instructions: list[Instruction]
    last: str  # "bra", "exit", "bar" or "" for one that falls through
    target: int  # of the branch
    following: int
    meeting: int = EXIT  # block where lanes that part here meet


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
            if last.operands[0].name not in program.labels:
                raise KernelError(f"PTX line {last.line}: no label {last.operands[0].name}")
            target = number[program.labels[last.operands[0].name]]
        blocks.append(Block(instructions[start:end], kind, target, number[end]))
    _find_meetings(blocks)
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


def _find_meetings(blocks: list[Block]) -> None:
    # Sets of post-dominators as the bits of integers; those of one block form a chain.
    everything = (1 << len(blocks)) - 1
    sets = dict.fromkeys(range(len(blocks)), everything) | {EXIT: 0}
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(blocks))):
            common = everything
            for successor in _successors(blocks[i]):
                common &= sets[successor]
            new = common | 1 << i
            changed, sets[i] = changed or new != sets[i], new
    counts = {i: bits.bit_count() for i, bits in sets.items()}
    for i, block in enumerate(blocks):
        rest = sets[i] & ~(1 << i)
        while rest:
            j = rest.bit_length() - 1
            if counts[j] == counts[i] - 1:
                block.meeting = j
                break
            rest &= ~(1 << j)
