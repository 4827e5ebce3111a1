"""wgmma: products of a warpgroup's A and B with D in registers, B and maybe A in shared memory.

PTX ISA, sections on asynchronous warpgroup-level matrix instructions. Each warp has 16 rows of A
and D, in fragments like those of mma.sync. A and B are read when a product begins; D holds noise
until a wait has ended the product's group, so that whoever reads it too early is found out.
"""

import numpy as np

from .decode import TYPES, instruction
from .matrix import _GROUP, _THREAD, _Fragments, _layout
from .ptx import Immediate, KernelError, Register

_NOISE = np.uint32(0x7FC0DEAD)  # a NaN, or a large integer
_LANES = np.arange(32)
_SWIZZLED_BITS = {3: 1, 2: 2, 1: 3}  # by the descriptor's layout type: of a row's number


class Products:
    """What D will hold once the products under way have ended."""

    def __init__(self, machine):
        self._m = machine
        self._values: dict[int, np.ndarray] = {}  # by register, [warps, 32]
        self._group: dict[int, np.ndarray] = {}  # [warps], -1: nothing is under way
        self._committed = np.zeros(machine.shape[0], "i8")

    def read(self, index: int, warps: np.ndarray) -> np.ndarray:
        now = self._m.registers[index][warps]
        if index not in self._group:
            return now
        under_way = self._group[index][warps] >= 0
        return np.where(under_way[:, None], self._values[index][warps], now)

    def begin(self, index: int, warps: np.ndarray, values: np.ndarray) -> None:
        m = self._m
        if index not in self._group:
            self._values[index] = np.zeros(m.shape, "u4")
            self._group[index] = np.full(m.shape[0], -1)
        self._values[index][warps] = values.view("u4")
        self._group[index][warps] = self._committed[warps]
        m.registers[index] = m.registers[index].copy()
        m.registers[index][warps] = _NOISE

    def commit(self, warps: np.ndarray) -> None:
        self._committed[warps] += 1

    def wait(self, warps: np.ndarray, pending: int) -> None:
        waits = np.zeros(self._m.shape[0], bool)
        waits[warps] = True
        for index, group in self._group.items():
            ended = waits & (group >= 0) & (group < self._committed - pending)
            if ended.any():
                registers = self._m.registers[index].copy()
                registers[ended] = self._values[index][ended]
                self._m.registers[index] = registers
                group[ended] = -1


def _descriptor(m, read, warps):
    """Start address, leading and stride offset in bytes, and swizzled bits, of all warps alike."""
    lanes = np.broadcast_to(read(m), m.shape)[warps]
    if (lanes != lanes[:, :1]).any():
        raise KernelError("lanes of a warp disagree on a descriptor")
    bits = lanes[:, 0].astype("u8")
    field = lambda first: ((bits >> np.uint64(first)) & np.uint64(0x3FFF)).astype("i8") * 16  # noqa: E731
    swizzle = bits[0] >> np.uint64(62)
    if int(swizzle) not in _SWIZZLED_BITS:
        raise KernelError("matrices without swizzling are unknown here")
    return field(0), field(16), field(32), _SWIZZLED_BITS[int(swizzle)]


def _fetch(m, warps, starts, offsets, swizzled_bits):
    """Sixteen bytes at each of ``offsets`` [...] from ``starts`` [warps]: u4 [warps, ..., 4]."""
    address = starts.reshape(-1, *[1] * offsets[0].ndim) + offsets
    address ^= (address >> 7 & (1 << swizzled_bits) - 1) << 4
    by = np.repeat(warps, address[0].size)
    places = m.shared.place(address.ravel(), m.block_of_warp[by], 16)
    m.races.read(by, places, 16)
    return m.shared.load(places, 4, 4).reshape(*address.shape, 4)


def _panel(m, warps, read, rows):
    """Rows of 32 bytes of k, [warps, rows, 32]; rows: numbers [n] or, of each warp, [warps, n].

    In memory they are as long as the swizzle is wide, and the product starts anywhere in them.
    """
    start, _, stride, bits = _descriptor(m, read, warps)
    row, half = np.broadcast_to(rows, (len(warps), rows.shape[-1]))[..., None], np.arange(2)
    offsets = stride.reshape(-1, 1, 1) * (row // 8) + row % 8 * (16 << bits) + half * 16
    words = _fetch(m, warps, start, offsets, bits)
    return np.ascontiguousarray(words.reshape(*row.shape[:2], 8)).view("u1")


def _rows_of_n(m, warps, read, n, dtype):
    """B [warps, 32 bytes of k, n] where k is contiguous."""
    return _panel(m, warps, read, np.arange(n)).view(dtype).swapaxes(1, 2)


def _rows_of_a(m, warps, read, dtype):
    """A [warps, 16, 32 bytes of k], of which each warp of the group has its sixteen rows."""
    return _panel(m, warps, read, warps[:, None] % 4 * 16 + np.arange(16)).view(dtype)


def _rows_of_k(m, warps, read, n, dtype):
    """B [warps, 16, n] of 16-bit words where n is contiguous."""
    start, leading, stride, bits = _descriptor(m, read, warps)
    row, unit = np.arange(16)[:, None], np.arange(n // 8)
    per_row = 1 << bits  # units of 16 bytes
    offsets = (
        leading.reshape(-1, 1, 1) * (unit // per_row)
        + stride.reshape(-1, 1, 1) * (row // 8)
        + row % 8 * (16 * per_row)
        + unit % per_row * 16
    )
    words = _fetch(m, warps, start, offsets, bits)
    return np.ascontiguousarray(words.reshape(len(warps), 16, n // 2)).view(dtype)


def _product(op, n, a_type, b_type, d_type, bits, fetch):
    d, a, b, adds = op.operands[:4]
    indices = [part.index for part in d.parts]
    b, adds = op.read(b, "u64"), op.read(adds, "pred")
    in_shared = isinstance(a, Register)
    a = op.read(a, "u64") if in_shared else _Fragments(op, a)
    if len(indices) != n // 2 or (not in_shared and len(a.reads) != 4):
        raise KernelError("fragments of a wrong size")
    order_a, _ = _layout(bits)
    k = 256 // bits
    a_type, b_type = TYPES[a_type], TYPES[b_type]

    def run(m):
        warps = m.whole_warps()
        if not len(warps):
            return
        if in_shared:
            x = _rows_of_a(m, warps, a, a_type)
        else:
            words = a(m, warps).reshape(len(warps), -1)
            x = np.take(words.view(a_type), order_a, 1).reshape(-1, 16, k)
        products = x.astype("f8") @ fetch(m, warps, b, n, b_type).astype("f8")
        added = np.broadcast_to(adds(m), m.shape)[warps]
        for i, index in enumerate(indices):
            rows, columns = _GROUP[:, 0] + i % 4 // 2 * 8, i // 4 * 8 + 2 * _THREAD[:, 0] + i % 2
            values = products[:, rows, columns]
            before = np.where(added, m.products.read(index, warps), 0).astype("u4")
            if d_type == "f32":
                values = (values + before.view("f4")).astype("f4")
            else:
                values = (values.astype("i8") + before.view("i4")).astype("i4")
            m.products.begin(index, warps, values)

    return run


@instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.s32\.([su]8)\.([su]8)")
def _bytes(op, n, a_type, b_type):
    return _product(op, int(n), a_type, b_type, "s32", 8, _rows_of_n)


@instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(f16|bf16)\.\2")
def _halves(op, n, dtype):
    a, flags = op.operands[1], [x.bits for x in op.operands[4:] if isinstance(x, Immediate)]
    signs, transposed = flags[:2], flags[2:]
    if signs != [1, 1]:
        raise KernelError("products with a change of sign are unknown here")
    if isinstance(a, Register) and transposed.pop(0):
        raise KernelError("a transposed A is unknown here")
    fetch = {(0,): _rows_of_n, (1,): _rows_of_k}[tuple(transposed)]
    return _product(op, int(n), dtype, dtype, "f32", 16, fetch)


@instruction(r"wgmma\.fence\.sync\.aligned")
def _fence(op):
    return lambda m: None


@instruction(r"wgmma\.commit_group\.sync\.aligned")
def _commit(op):
    return lambda m: m.products.commit(m.whole_warps())


@instruction(r"wgmma\.wait_group\.sync\.aligned")
def _wait(op):
    pending = op.operands[0].bits
    return lambda m: m.products.wait(m.whole_warps(), pending)
