"""Barriers: those of a block by number, and mbarriers in shared memory."""

from dataclasses import dataclass, field

import numpy as np

from .decode import by_lane, instruction, read, write
from .ptx import KernelError

_MOST_ARRIVALS = 2**20 - 1


# ------------------------------------------------------------------------------- barriers of blocks
@dataclass
class _Meeting:
    threads: int  # that it is for
    combine: str | None  # what becomes of the votes
    arrived: int = 0  # threads
    votes: list[bool] = field(default_factory=list)  # of threads
    waiting: dict = field(default_factory=dict)  # what puts the result, of each warp that waits
    known: np.ndarray | int = 0  # by those who arrived, see races.py


_COMBINED = {"popc": np.sum, "or": np.any, "and": np.all}


class BlockBarriers:
    def __init__(self, machine):
        self._m = machine
        self._meetings: dict[tuple[int, int], _Meeting] = {}  # by block and number

    def arrive(self, numbers, threads, wait, combine, put, votes) -> None:
        """By the active warps; of ``votes`` [warps, 32] something is ``put``."""
        m, wanted = self._m, threads or self._m.threads
        for warp in np.flatnonzero(m.mask.any(1)):
            number, *others = np.unique(numbers[warp][m.mask[warp]])
            if others or (m.mask[warp] != m.alive[warp]).any():
                raise KernelError(f"only part of warp {warp % m.per_block} arrives at a barrier")
            if number > 15 or (threads or 32) % 32:
                raise KernelError(f"barrier {number} for {threads} threads: < 16, for whole warps")
            key = warp // m.per_block, number
            meeting = self._meetings.setdefault(key, _Meeting(wanted, combine))
            if (meeting.threads, meeting.combine) != (wanted, combine):
                raise KernelError(f"barrier {number} is used in two ways at once")
            meeting.known = np.maximum(meeting.known, m.races.release(warp))
            meeting.arrived += 32 if threads else int(m.alive[warp].sum())
            meeting.votes.extend(votes[warp][m.mask[warp]])
            if wait:
                meeting.waiting[warp] = put
                m.waiting[warp] = True
            if meeting.arrived > wanted:
                raise KernelError(f"{meeting.arrived} threads arrive at barrier {number}")
            if meeting.arrived == wanted:
                self._end(self._meetings.pop(key))

    def _end(self, meeting: _Meeting) -> None:
        m, warps = self._m, list(meeting.waiting)
        m.waiting[warps] = False
        m.races.acquire(warps, meeting.known)
        for warp, put in meeting.waiting.items() if meeting.combine else ():
            with m.exactly(m.alive & (m.warp_of_lane == warp)):
                put(m, _COMBINED[meeting.combine](meeting.votes))


def _arrival(number, threads, wait=True, combine=None, d=None, dtype="pred", vote=1):
    number, put, vote = read(number, "u32"), write(d, dtype), read(vote, "pred")
    if not isinstance(threads, int | None):
        raise KernelError("the size of a barrier must be a constant here")

    def run(m):
        numbers, votes = (np.broadcast_to(x(m), m.shape) for x in (number, vote))
        m.barriers.arrive(numbers, threads, wait, combine, put, votes)

    return run


_BARRIER = r"bar(?:rier)?(?:\.cta)?"


@instruction(_BARRIER + r"\.(sync|arrive)(?:\.aligned)?")
def _barrier(kind, number, threads=None):
    return _arrival(number, threads, wait=kind == "sync")


@instruction(_BARRIER + r"\.red\.(popc|and|or)(?:\.aligned)?\.(u32|pred)")
def _reduction(combine, dtype, d, number, *rest):
    threads, vote = (None, *rest)[-2:]
    return _arrival(number, threads, combine=combine, d=d, dtype=dtype, vote=vote)


# ---------------------------------------------------------------------------------------- mbarriers
@dataclass
class _Mbarrier:
    arrivals: int  # per phase
    missing: int
    bytes: int = 0  # that copies still have to bring; below zero before they are announced
    phase: int = 0
    arrived: np.ndarray | int = 0  # known by those who arrived, see races.py
    known: np.ndarray | int = 0  # at the end of the last phase


class Mbarriers:
    def __init__(self, machine):
        self._m = machine
        self._at: dict[int, _Mbarrier] = {}  # by place in shared memory

    def _place(self, warp: int, address: int) -> int:
        return int(self._m.shared.place(np.array([warp]), np.array([address]), 8)[0])

    def find(self, warp: int, address: int) -> int:
        place = self._place(warp, address)
        if place not in self._at:
            raise KernelError(f"there is no mbarrier at shared address {address:#x}")
        return place

    def init(self, warp: int, address: int, arrivals: int) -> None:
        place = self._place(warp, address)
        if place in self._at or not 1 <= arrivals <= _MOST_ARRIVALS:
            raise KernelError(f"mbarrier for {arrivals} arrivals where one is: {place in self._at}")
        self._at[place] = _Mbarrier(arrivals, arrivals)
        self._m.shared.reserve(place)

    def arrive(self, warp: int, address: int, bytes_: int = 0) -> None:
        self.advance(self.find(warp, address), 1, bytes_, self._m.races.release(warp))

    def advance(self, place: int, arrivals: int, bytes_: int, known: np.ndarray) -> None:
        """Arrivals, and bytes that they announce, or that have come, which count below zero."""
        now = self._at[place]
        now.arrived = np.maximum(now.arrived, known)
        now.missing -= arrivals
        now.bytes += bytes_
        if now.missing < 0 or abs(now.bytes) > _MOST_ARRIVALS:
            raise KernelError("more arrivals or bytes than an mbarrier can take")
        if now.missing == 0 and now.bytes == 0:
            now.missing, now.known = now.arrivals, now.arrived
            now.phase += 1
            self._m.wake(place // self._m.shared.stride)

    def has_ended(self, warp: int, address: int, parity: int) -> bool:
        """Of a phase. A warp to whom this says no sleeps until one has: it would only ask again."""
        now = self._at[self.find(warp, address)]
        if parity > 1:
            raise KernelError(f"parity {parity} of an mbarrier's phase")
        if now.phase % 2 == parity:
            self._m.asleep[warp] = True
            return False
        self._m.races.acquire(warp, now.known)
        return True


def _arrive_behind_copies(m, warp, address):
    m.copies.wait_all()
    m.mbarriers.arrive(warp, address)


def _arrive(m, *numbers):
    m.mbarriers.arrive(*numbers)


_SHARED = r"\.shared(?:::cta)?\.b64"
_OF_CTA = r"(?:\.release|\.acquire)?(?:\.cta)?" + _SHARED
by_lane(r"mbarrier\.init" + _SHARED, "[] u32", lambda m, *numbers: m.mbarriers.init(*numbers))
# The state that arriving gives is unknown here: use the waits by parity.
by_lane(r"mbarrier\.arrive" + _OF_CTA, "_ []", _arrive)
by_lane(r"mbarrier\.arrive\.expect_tx" + _OF_CTA, "_ [] u32", _arrive)
by_lane(r"cp\.async\.mbarrier\.arrive\.noinc" + _SHARED, "[]", _arrive_behind_copies)
by_lane(
    r"mbarrier\.(?:try|test)_wait\.parity" + _OF_CTA,
    "=pred [] u32",
    lambda m, *numbers: m.mbarriers.has_ended(*numbers),
)
