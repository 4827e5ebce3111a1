"""Runs blocks of threads: warps that stand at one place go on together, in one array operation.

A seed decides which warps go on and how far before others do, which side of a parted warp goes
first, and when asynchronous copies end. Seed 0 keeps warps in step and ends copies last of all.
"""

import contextlib
import random
from typing import NamedTuple

import numpy as np

from . import access, arithmetic, conversions, cross_lane, matrix  # noqa: F401  they register themselves
from .barriers import BlockBarriers, Mbarriers
from .copies import Copies
from .decode import Op, check_known, decode
from .flow import EXIT, Block, cut
from .memory import Shared, Tensors
from .ptx import Instruction, KernelError, Program
from .races import Races
from .wgmma import Products


class Code:
    """A program for all of its launches; blocks are decoded when one gets there."""

    def __init__(self, program: Program):
        self.program = program
        self.blocks = cut(program)
        self._decoded: dict[int, tuple] = {}
        for block in self.blocks:
            for what in _body(block):
                check_known(what)

    def decoded(self, at: int) -> tuple:
        """The functions of a block's instructions, and the guard of the branch that ends it."""
        if at not in self._decoded:
            block, guard = self.blocks[at], None
            last = block.instructions[-1]
            if _branches(block) and last.guard is not None:
                guard = Op(last).read(last.guard, "pred")
            runs = [decode(what) for what in _body(block)]
            self._decoded[at] = runs, guard
        return self._decoded[at]


def _branches(block: Block) -> bool:
    return block.last in ("bra", "exit")


def _body(block: Block) -> list[Instruction]:
    return block.instructions[:-1] if _branches(block) else block.instructions


class Launch(NamedTuple):
    parameters: bytes  # of the kernel
    blocks: int
    threads: int  # of a block
    shared_bytes: int = 0  # beside those that the kernel declares
    seed: int = 0


class Machine:
    """Consecutive ``blocks`` of a launch, from start to end of their threads."""

    def __init__(self, code: Code, tensors: Tensors, launch: Launch, blocks: range):
        per_block, threads = -(-launch.threads // 32), launch.threads
        self.code, self.tensors, self.threads = code, tensors, threads
        self.parameters = np.frombuffer(launch.parameters, np.uint8)
        warps = len(blocks) * per_block
        self.shape = (warps, 32)
        self.registers = [
            np.zeros(self.shape, f"u{n}" if n else bool) for n in code.program.register_bytes
        ]
        self.block_of_warp = np.arange(warps) // per_block
        self.block_of_lane = np.broadcast_to(self.block_of_warp[:, None], self.shape)
        self.warp_of_lane = np.broadcast_to(np.arange(warps)[:, None], self.shape)
        thread = np.arange(warps)[:, None] % per_block * 32 + np.arange(32)
        specials = {
            **{f"%{name}.{axis}": 0 for name in ("tid", "ctaid") for axis in "yz"},
            **{f"%{name}.{axis}": 1 for name in ("ntid", "nctaid") for axis in "yz"},
            "%tid.x": thread,
            "%ctaid.x": blocks.start + self.block_of_lane,
            "%ntid.x": threads,
            "%nctaid.x": launch.blocks,
            "%laneid": thread % 32,
        }
        self._specials = {
            name: np.broadcast_to(np.asarray(value, "u4"), self.shape)
            for name, value in specials.items()
        }
        self._first = blocks.start
        self.shared = Shared(len(blocks), code.program.static_shared + launch.shared_bytes)
        self.races = Races(warps, per_block, len(blocks) * self.shared.stride // 4)
        self.copies, self.products = Copies(self), Products(self)
        self.barriers, self.mbarriers = BlockBarriers(self), Mbarriers(self)

        self.alive = thread < threads
        self.waiting = np.zeros(warps, bool)  # at a barrier
        self.asleep = np.zeros(warps, bool)  # until a phase of an mbarrier ends
        self._at = np.zeros(warps, "i8")  # block of instructions that each warp is to run next
        self._lanes = self.alive.copy()  # those that run it
        self._others: dict[int, dict] = {}  # of a parted warp: its other lanes, by their block
        self._scheduler = _Scheduler(launch.seed, per_block, warps)
        self._set_mask(self.alive)

    # ------------------------------------------------------------------------ what instructions use
    def special(self, name: str) -> np.ndarray:
        if name not in self._specials:
            raise KernelError(f"unknown register {name}")
        return self._specials[name]

    def _set_mask(self, mask: np.ndarray) -> None:
        self.mask, self._full, some = mask, mask.all(1), mask.any(1)
        self.everyone, self.anyone = bool(self._full.all()), bool(some.any())
        self.whole = bool((self._full == some).all())  # no warp in part

    @contextlib.contextmanager
    def exactly(self, mask: np.ndarray):
        before = self.mask
        self._set_mask(mask)
        yield
        self._set_mask(before)

    def only(self, condition: np.ndarray):
        return self.exactly(self.mask & condition)

    def whole_warps(self) -> np.ndarray:
        """The active warps, for what all lanes must do together."""
        if not self.whole:
            raise KernelError("only part of a warp runs what all its lanes must run together")
        return np.flatnonzero(self._full)

    def active(self, array) -> np.ndarray:
        """The values of ``array`` in active lanes, [n]."""
        array = np.asarray(array)
        if array.shape != self.shape:
            array = np.broadcast_to(array, self.shape)
        return array.ravel() if self.everyone else array[self.mask]

    def spread(self, values: np.ndarray) -> np.ndarray:
        """The inverse: [warps, 32] with ``values`` [n] in active lanes."""
        if self.everyone:
            return values.reshape(self.shape)
        result = np.zeros(self.shape, values.dtype)
        result[self.mask] = values
        return result

    def each(self, *values):
        """(warp, lane, a Python integer of each) for every active lane."""
        arrays = [np.broadcast_to(x, self.shape) for x in values]
        for warp, lane in np.argwhere(self.mask):
            yield warp, lane, *(int(x[warp, lane]) for x in arrays)

    def put_warps(self, put, warps: np.ndarray, values: np.ndarray) -> None:
        """Write ``values`` [len(warps), 32]."""
        if len(warps) != self.shape[0]:
            spread = np.zeros(self.shape, values.dtype)
            spread[warps] = values
            values = spread
        put(self, np.ascontiguousarray(values))

    def wake(self, block: int) -> None:
        self.asleep[self.block_of_warp == block] = False

    def name(self, warp: int) -> str:
        block = self.block_of_warp[warp]
        first = int(np.argmax(self.block_of_warp == block))
        return f"{warp - first} of block {self._first + block}"

    # -------------------------------------------------------------------------------------- running
    def run(self) -> None:
        with np.errstate(all="ignore"):
            while True:
                there = self._at != EXIT
                ready = there & ~self.waiting & ~self.asleep
                if ready.any():
                    self._scheduler.end_some(self.copies)
                    chosen = self._scheduler.choose(ready, self._at)
                    self._step(int(self._at[chosen.argmax()]), chosen)
                elif not there.any():
                    return
                elif len(self.copies):
                    self.copies.finish_one(0)
                else:
                    raise KernelError(f"the warps wait for each other: {self._places(there)}")

    def _places(self, warps: np.ndarray) -> str:
        seen = {}
        for one in np.flatnonzero(warps):
            at = self.code.blocks[self._at[one]].instructions[0]
            seen.setdefault(f"{at.line} ({at.source})", []).append(self.name(one))
        return "; ".join(f"before PTX line {line}: {names[:4]}" for line, names in seen.items())

    def _step(self, at: int, chosen: np.ndarray) -> None:
        self._set_mask(self._lanes & chosen[:, None])
        block, (runs, guard) = self.code.blocks[at], self.code.decoded(at)
        step = -1
        try:
            for step, run in enumerate(runs):  # noqa: B007
                run(self)
        except KernelError as fault:
            who = ", ".join(map(self.name, np.flatnonzero(self.mask.any(1))[:4]))
            raise KernelError(
                f"{block.instructions[step]}\n  {fault}\n  warps {who}, ..."
            ) from fault
        taken = self.mask if guard is None else self.mask & guard(self)
        if block.last == "exit":
            self.alive &= ~taken
        self._leave(chosen, block, taken if _branches(block) else np.zeros_like(taken))

    def _leave(self, chosen: np.ndarray, block: Block, taken: np.ndarray) -> None:
        """Of the ``chosen`` warps, lanes ``taken`` go to the block's target, the rest follows."""
        goes, stays = taken.any(1), (self.mask & ~taken).any(1)
        self._at[chosen & goes] = block.target
        self._at[chosen & ~goes] = block.following
        for one in {*np.flatnonzero(goes & stays), *self._others} & {*np.flatnonzero(chosen)}:
            groups = self._others.pop(one, {})
            for at, lanes in (
                (block.target, taken[one]),
                (block.following, self.mask[one] & ~taken[one]),
            ):
                groups[at] = groups.get(at, False) | lanes
            self._select(one, {at: x for at, x in groups.items() if at != EXIT and x.any()})

    def _select(self, one: int, groups: dict[int, np.ndarray]) -> None:
        """Which lanes of a parted warp go on: some to whom no others will come."""
        blocks = self.code.blocks
        ready = [x for x in groups if not any(blocks[y].ahead >> x & 1 for y in groups)]
        at = self._scheduler.pick(ready) if ready else EXIT
        self._at[one] = at
        self._lanes[one] = groups.pop(at, False)
        if groups:
            self._others[one] = groups


class _Scheduler:
    def __init__(self, seed: int, per_block: int, warps: int):
        self._random = random.Random(seed) if seed else None
        self._warp = np.arange(warps) % per_block  # of its block; blocks of threads keep in step
        self._per_block = per_block
        self._steps = 0
        self._end_share = self._random.choice((0, 0.02, 0.3, 1)) if seed else 0

    def choose(self, ready: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Warps at one place, out of those that are ready."""
        if self._random:
            if self._steps == 0:
                self._steps = self._random.randint(1, 30)
                share = self._random.choice((0.1, 0.5, 0.9))
                favoured = [self._random.random() < share for _ in range(self._per_block)]
                self._favoured = np.array(favoured)[self._warp]
            self._steps -= 1
            if (ready & self._favoured).any():
                ready = ready & self._favoured
            if self._random.random() < 0.3:
                return ready & (at == at[self._random.choice(np.flatnonzero(ready))])
        return ready & (at == at[ready].min())

    def pick(self, blocks: list[int]) -> int:
        return self._random.choice(sorted(blocks)) if self._random else min(blocks)

    def end_some(self, copies: Copies) -> None:
        if self._random and len(copies) and self._random.random() < self._end_share:
            copies.finish_one(self._random.randrange(len(copies)))
