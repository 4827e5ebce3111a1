"""Runs blocks of threads: warps that stand at one place go on together, in one array operation.

A seed decides which warps go on and how far before others do, which side of a parted warp goes
first, and when asynchronous copies end. Seed 0 keeps warps in step and ends copies last of all.
"""

import contextlib
from typing import NamedTuple

import numpy as np

from . import access, arithmetic, conversions, cross_lane, matrix  # noqa: F401  they register themselves
from .barriers import BlockBarriers, Mbarriers
from .copies import Copies
from .decode import decode, instruction
from .flow import EXIT, Block, cut
from .memory import Memory, Shared
from .ptx import SPECIAL, KernelError, Program
from .wgmma import Products


class Code:
    """A program for all of its launches."""

    def __init__(self, program: Program):
        self.program, self.blocks = program, cut(program)
        self.steps = [[(x, decode(x)) for x in block.instructions] for block in self.blocks]


@instruction(r"bra(?:\.uni)?|ret|exit")
def _branch(*label):
    def run(m):
        m.taken = m.mask

    return run


class Launch(NamedTuple):
    parameters: bytes  # of the kernel
    blocks: int
    threads: int  # of a block
    shared_bytes: int = 0  # beside those that the kernel declares
    seed: int = 0


class Machine:
    """Consecutive ``blocks`` of a launch, from start to end of their threads."""

    def __init__(self, code: Code, tensors: Memory, launch: Launch, blocks: range):
        self.threads, self.per_block = launch.threads, -(-launch.threads // 32)  # warps
        self.shape = (len(blocks) * self.per_block, 32)
        self._code, self._first, self.tensors = code, blocks.start, tensors
        self.parameters = Memory({0: np.frombuffer(launch.parameters, np.uint8)})
        lanes = np.arange(self.shape[0] * 32).reshape(self.shape)
        self.warp_of_lane, (block, thread) = lanes // 32, np.divmod(lanes, 32 * self.per_block)
        self.registers = [np.zeros(self.shape, stored) for stored in code.program.registers]
        specials = (thread, blocks.start + block, launch.threads, launch.blocks)
        for register, value in zip(self.registers[: len(SPECIAL)], specials, strict=True):
            register[:] = value
        shared_bytes = code.program.static_shared + launch.shared_bytes
        self.shared = Shared(len(blocks), self.per_block, shared_bytes)
        self.races = self.shared.races
        self.copies, self.products = Copies(self), Products(self)
        self.barriers, self.mbarriers = BlockBarriers(self), Mbarriers(self)

        self.waiting = np.zeros(self.shape[0], bool)  # at a barrier
        self.asleep = np.zeros(self.shape[0], bool)  # until a phase of an mbarrier ends
        # The block of instructions that each lane is to run next, and the one that its warp is.
        self._at = np.where(thread < launch.threads, 0, EXIT)
        self._next = np.zeros(self.shape[0], "i8")
        self._scheduler = _Scheduler(launch.seed, self.per_block, self.shape[0])

    # ------------------------------------------------------------------------ what instructions use
    @property
    def alive(self) -> np.ndarray:
        return self._at != EXIT

    def _set_mask(self, mask: np.ndarray) -> None:
        self.mask, self.everyone = mask, bool(mask.all())

    @contextlib.contextmanager
    def exactly(self, mask: np.ndarray):
        """In what follows, these lanes are active."""
        before = self.mask
        self._set_mask(mask)
        yield
        self._set_mask(before)

    def whole_warps(self) -> np.ndarray:
        """The active warps, for what all lanes must do together."""
        whole = self.mask.all(1)
        if (whole != self.mask.any(1)).any():
            raise KernelError("only part of a warp runs what all its lanes must run together")
        return np.flatnonzero(whole)

    def active(self, array) -> np.ndarray:
        """The values of ``array`` in active lanes, [n]."""
        array = np.broadcast_to(array, self.shape)
        return array.ravel() if self.everyone else array[self.mask]

    def spread(self, values: np.ndarray) -> np.ndarray:
        """The inverse: [warps, 32] with ``values`` [n] in active lanes."""
        if self.everyone:
            return values.reshape(self.shape)
        result = np.zeros(self.shape, values.dtype)
        result[self.mask] = values
        return result

    def wake(self, block: int) -> None:
        self.asleep[block * self.per_block : (block + 1) * self.per_block] = False

    def names(self, warps: np.ndarray) -> str:
        """Some of ``warps`` [warps] of bool."""
        numbers = (divmod(warp, self.per_block) for warp in np.flatnonzero(warps)[:4])
        return ", ".join(f"warp {warp} of block {self._first + block}" for block, warp in numbers)

    # -------------------------------------------------------------------------------------- running
    def run(self) -> None:
        with np.errstate(all="ignore"):
            while (there := self._next != EXIT).any():
                ready = there & ~self.waiting & ~self.asleep
                if ready.any():
                    self._scheduler.end_some(self.copies)
                    self._step(self._scheduler.choose(ready, self._next))
                elif self.copies.pending:
                    self.copies.finish_one(0)
                else:
                    stuck = [
                        (self._next == at, self._code.blocks[at]) for at in {*self._next[there]}
                    ]
                    places = [f"{self.names(x)} before {y.instructions[0]}" for x, y in stuck]
                    raise KernelError(f"the warps wait for each other: {'; '.join(places)}")

    def _step(self, chosen: np.ndarray) -> None:
        """Run the block at which the ``chosen`` warps are."""
        at = self._next[chosen.argmax()]
        block = self._code.blocks[at]
        self._set_mask((self._at == at) & chosen[:, None])
        self.taken = np.zeros(self.shape, bool)  # by a branch
        try:
            for what, run in self._code.steps[at]:  # noqa: B007
                run(self)
        except KernelError as fault:
            raise KernelError(f"{what}\n  {fault}\n  {self.names(self.mask.any(1))}") from fault
        self._leave(block, chosen)

    def _leave(self, block: Block, chosen: np.ndarray) -> None:
        """Lanes that took the branch go to its target, the rest follows."""
        following = np.where(self.mask, block.following, self._at)
        self._at = np.where(self.taken, block.target, following)
        furthest = self._at.max(1)
        self._next[chosen] = furthest[chosen]
        parted = (self._at != furthest[:, None]) & (self._at != EXIT)
        for one in np.flatnonzero(chosen & parted.any(1)):
            # Lanes to whom others will come wait for them.
            places = {*self._at[one].tolist()} - {EXIT}
            ahead = [self._code.blocks[x].ahead for x in places]
            free = [x for x in places if not any(bits >> x & 1 for bits in ahead)]
            self._next[one] = self._scheduler.pick(free or places)


class _Scheduler:
    def __init__(self, seed: int, per_block: int, warps: int):
        self._random = np.random.default_rng(seed) if seed else None
        self._warp = np.arange(warps) % per_block  # of its block; blocks of threads keep in step
        self._steps = 0  # to go with the warps that are favoured now
        self._end_share = self._random.choice((0, 0.02, 0.3, 1)) if seed else 0

    def choose(self, ready: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Warps at one place, out of those that are ready."""
        if self._random:
            if self._steps == 0:
                self._steps = self._random.integers(1, 31)
                share = self._random.choice((0.1, 0.5, 0.9))
                self._favoured = (self._random.random(32) < share)[self._warp]
            self._steps -= 1
            if (ready & self._favoured).any():
                ready = ready & self._favoured
            if self._random.random() < 0.3:
                return ready & (at == at[self._random.choice(np.flatnonzero(ready))])
        return ready & (at == at[ready].min())

    def pick(self, blocks: set[int]) -> int:
        return self._random.choice(sorted(blocks)) if self._random else min(blocks)

    def end_some(self, copies: Copies) -> None:
        if self._random and copies.pending and self._random.random() < self._end_share:
            copies.finish_one(self._random.integers(len(copies.pending)))
