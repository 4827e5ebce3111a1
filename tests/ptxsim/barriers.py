"""Barriers: those of a block by number, and mbarriers in shared memory."""

from dataclasses import dataclass, field

import numpy as np

from .decode import instruction
from .ptx import KernelError

_MOST_ARRIVALS = 2**20 - 1


# ------------------------------------------------------------------------------- barriers of blocks
@dataclass
class _Meeting:
    threads: int | None = None  # that it is for; None: all of the block
    arrived: int = 0
    warps: list[int] = field(default_factory=list)  # that wait
    combine: str | None = None
    put: object = None
    trues: int = 0
    known: np.ndarray | int = 0  # by those who arrived, see races.py


class BlockBarriers:
    def __init__(self, machine):
        self._m = machine
        self._meetings: dict[tuple[int, int], _Meeting] = {}

    def arrive(
        self, number: int, threads: int | None, *, wait=True, combine=None, put=None, value=None
    ):
        m = self._m
        if not 0 <= number < 16 or (threads or 32) % 32:
            raise KernelError(f"barrier {number} for {threads} threads: 0 to 15, for whole warps")
        for warp in np.flatnonzero(m.mask.any(1)):
            if (m.mask[warp] != m.alive[warp]).any():
                raise KernelError(f"only part of warp {m.name(warp)} arrives at barrier {number}")
            key = int(m.block_of_warp[warp]), number
            meeting = self._meetings.setdefault(key, _Meeting(threads, combine=combine, put=put))
            if (meeting.threads, meeting.combine) != (threads, combine):
                raise KernelError(f"barrier {number} is used in two ways at once")
            meeting.known = np.maximum(meeting.known, m.races.release(warp))
            meeting.arrived += 32 if threads else int(m.alive[warp].sum())
            if value is not None:
                meeting.trues += int((value[warp] & m.mask[warp]).sum())
            if wait:
                meeting.warps.append(warp)
                m.waiting[warp] = True
            self._end(key, meeting)

    def _end(self, key: tuple[int, int], meeting: _Meeting) -> None:
        m = self._m
        wanted = meeting.threads or m.threads
        if meeting.arrived > wanted:
            raise KernelError(f"{meeting.arrived} threads arrive at barrier {key[1]} for {wanted}")
        if meeting.arrived < wanted:
            return
        del self._meetings[key]
        m.waiting[meeting.warps] = False
        m.races.acquire(meeting.warps, meeting.known)
        if meeting.combine:
            result = {
                "popc": np.uint32(meeting.trues),
                "or": np.bool_(meeting.trues > 0),
                "and": np.bool_(meeting.trues == meeting.arrived),
            }[meeting.combine]
            lanes = np.zeros(m.shape, bool)
            lanes[meeting.warps] = m.alive[meeting.warps]
            with m.exactly(lanes):
                meeting.put(m, np.full(m.shape, result))


def _number(operand) -> int | None:
    if not isinstance(operand, int | None):
        raise KernelError("a barrier's number and size must be constants here")
    return operand


@instruction(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?")
def _barrier(op, kind):
    number, *threads = op.operands
    number, threads = op.read(number, "u32"), _number(threads[0] if threads else None)

    def run(m):
        numbers = np.broadcast_to(number(m), m.shape)
        for one in np.unique(numbers[m.mask]):
            with m.only(numbers == one):
                m.barriers.arrive(int(one), threads, wait=kind == "sync")

    return run


@instruction(r"(?:bar|barrier)(?:\.cta)?\.red\.(popc|and|or)(?:\.aligned)?\.(u32|pred)")
def _reduction(op, combine, dtype):
    d, number, *threads, value = op.operands
    put, value = op.write(d, dtype), op.read(value, "pred")
    number, threads = _number(number), _number(threads[0] if threads else None)
    return lambda m: m.barriers.arrive(
        number, threads, combine=combine, put=put, value=np.broadcast_to(value(m), m.shape)
    )


# ---------------------------------------------------------------------------------------- mbarriers
@dataclass
class _Phases:
    arrivals: int  # per phase
    missing: int
    bytes: int = 0  # that copies still have to bring; below zero before they are announced
    phase: int = 0
    arrived: np.ndarray | int = 0  # known by those who arrived, see races.py
    known: np.ndarray | int = 0  # at the end of the last phase


class Mbarriers:
    def __init__(self, machine):
        self._m = machine
        self._phases: dict[int, _Phases] = {}  # by place in shared memory

    def find(self, warp: int, address: int) -> int:
        place = self._place(warp, address)
        if place not in self._phases:
            raise KernelError(f"there is no mbarrier at shared address {address:#x}")
        return place

    def _place(self, warp: int, address: int) -> int:
        block = self._m.block_of_warp[warp : warp + 1]
        return int(self._m.shared.place(np.array([address]), block, 8)[0])

    def init(self, warp: int, address: int, arrivals: int) -> None:
        place = self._place(warp, address)
        if place in self._phases or not 1 <= arrivals <= _MOST_ARRIVALS:
            raise KernelError(
                f"mbarrier for {arrivals} arrivals where one is: {place in self._phases}"
            )
        self._phases[place] = _Phases(arrivals, arrivals)
        self._m.shared.reserve(place)

    def arrive(self, warp: int, address: int, arrivals: int = 1, bytes_: int = 0) -> None:
        place = self.find(warp, address)
        self._advance(place, arrivals, bytes_, self._m.races.release(warp))

    def complete(self, place: int, bytes_: int, known: np.ndarray) -> None:
        self._advance(place, 0, -bytes_, known)

    def _advance(self, place: int, arrivals: int, bytes_: int, known: np.ndarray) -> None:
        now = self._phases[place]
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
        now = self._phases[self.find(warp, address)]
        if now.phase % 2 == parity:
            return False
        self._m.races.acquire(warp, now.known)
        return True


_SHARED = r"(?:\.release|\.acquire)?(?:\.cta)?\.shared(?:::cta)?\.b64"


@instruction(r"mbarrier\.init\.shared(?:::cta)?\.b64")
def _init(op):
    address, count = op.address(op.operands[0]), op.read(op.operands[1], "u32")

    def run(m):
        for warp, _, where, arrivals in m.each(address(m), count(m)):
            m.mbarriers.init(warp, where, arrivals)

    return run


@instruction(r"mbarrier\.arrive(\.expect_tx)?" + _SHARED)
def _arrive(op, expecting):
    """The state that it gives is unknown here: use the waits by parity."""
    _, address, *amount = op.operands
    address = op.address(address)
    amount = op.read(amount[0] if amount else 1, "u32")

    def run(m):
        for warp, _, where, number in m.each(address(m), amount(m)):
            if expecting:
                m.mbarriers.arrive(warp, where, 1, number)
            else:
                m.mbarriers.arrive(warp, where, number)

    return run


@instruction(r"cp\.async\.mbarrier\.arrive\.noinc\.shared(?:::cta)?\.b64")
def _arrive_behind_copies(op):
    address = op.address(op.operands[0])

    def run(m):
        m.copies.wait()
        for warp, _, where in m.each(address(m)):
            m.mbarriers.arrive(warp, where)

    return run


@instruction(r"mbarrier\.(?:try|test)_wait\.parity" + _SHARED)
def _wait(op):
    """A warp whose phase has not ended sleeps until one has, as it would only ask again."""
    d, address, parity = op.operands
    put, address, parity = op.write(d, "pred"), op.address(address), op.read(parity, "u32")

    def run(m):
        ended = np.zeros(m.shape, bool)
        for warp, lane, where, odd in m.each(address(m), parity(m)):
            if odd > 1:
                raise KernelError(f"parity {odd} of an mbarrier's phase")
            ended[warp, lane] = m.mbarriers.has_ended(warp, where, odd)
            if not ended[warp, lane]:
                m.asleep[warp] = True
        put(m, ended)

    return run
