"""wgmma: products of a warpgroup's matrices A and B, with D in registers (PTX ISA, section 9.7.15).

Each warp has 16 rows of A and D, in fragments like those of mma.sync; B, and A if it likes, lies in
shared memory and is read when a product begins. D holds noise until a wait has ended the product's
group, so that whoever reads it too early is found out.
"""

import numpy as np

from .access import load_rows
from .decode import TYPES, instruction, parts_of
from .matrix import GROUP, THREAD, Fragments, elements, layout, rounded
from .ptx import KernelError

_NOISE = np.uint32(0x7FC0DEAD)  # a NaN, or a large integer


class Products:
    """What D will hold once the products under way have ended."""

    def __init__(self, machine):
        self._m = machine
        self._values: dict[int, np.ndarray] = {}  # by register, [warps, 32]
        self._group: dict[int, np.ndarray] = {}  # [warps], -1: nothing is under way
        self._committed = np.zeros(machine.shape[0], "i8")
        self.fenced = np.zeros(machine.shape[0], bool)  # since their last wait

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
        self.fenced[warps] = False
        waits = np.zeros(self._m.shape[0], bool)
        waits[warps] = True
        for index, group in self._group.items():
            ended = waits & (group >= 0) & (group < self._committed - pending)
            if ended.any():
                registers = self._m.registers[index].copy()
                registers[ended] = self._values[index][ended]
                self._m.registers[index] = registers
                group[ended] = -1


_START, _LEADING, _STRIDE, _SWIZZLE = 0, 16, 32, 62  # first bits of a descriptor's fields
_UNKNOWN = np.uint64(0x3FFFC000C000C000)  # a descriptor's other bits; of its base offset also
_SWIZZLED_BITS = np.array([0, 3, 2, 1])  # of a row's number, by the descriptor's kind of swizzling


def _descriptor(m, read, warps):
    """Start address, leading and stride offset in bytes, and swizzled bits: [warps, 1, 1] each."""
    lanes = np.broadcast_to(read(m), m.shape)[warps]
    if (lanes != lanes[:, :1]).any():
        raise KernelError("lanes of a warp disagree on a descriptor")
    if (lanes & _UNKNOWN).any():
        raise KernelError(f"descriptor {lanes[0, 0]:#x} sets bits that are unknown here")
    bits = lanes[:, 0].astype("i8").reshape(-1, 1, 1)
    fields = [(bits >> first & 0x3FFF) * 16 for first in (_START, _LEADING, _STRIDE)]
    return *fields, _SWIZZLED_BITS[bits >> _SWIZZLE & 3]


def _fetch(m, warps, read, rows, units, transposed):
    """16 bytes of each of ``rows`` and ``units`` of a matrix, [..., rows, 1] and [..., units].

    A row is one of M or N with K along it, or one of K where ``transposed``. Eight rows of as many
    units as swizzling mixes (one without it) follow each other; the offsets are from there on.
    """
    start, leading, stride, bits = _descriptor(m, read, warps)
    if transposed:  # without swizzling the offsets are of the dimensions, else of rows and units
        leading, stride = (np.where(bits, *x) for x in ((leading, stride), (stride, leading)))
    address = start + leading * (units >> bits) + stride * (rows // 8)
    address = address + (((rows % 8) << bits) + (units & (1 << bits) - 1)) * 16
    address ^= (address >> 7 & (1 << bits) - 1) << 4
    return load_rows(m, warps, address, by_proxy=True)


def _in_shared(op, operand, dtype, rows, k, transposed, by_warp):
    """A function of the machine and warps: ``rows`` of A or columns of B, [warps, rows, k].

    by_warp: each warp of a warpgroup has rows of its own.
    """
    read, row = op.read(operand, "u64"), np.arange(rows)

    def fetch(m, warps):
        mine = m.special("%tid.x")[warps, :1].astype("i8") // 32 % 4 * rows * by_warp + row
        if transposed:
            words = _fetch(m, warps, read, np.arange(k)[:, None], mine[:, None, ::8] // 8, True)
            return elements(words, dtype).reshape(-1, k, rows).swapaxes(1, 2)
        words = _fetch(m, warps, read, mine[:, :, None], np.arange(2), False)
        return elements(words, dtype).reshape(-1, rows, k)

    return fetch


def _in_registers(op, operand, dtype, k):
    fragments, (order, _) = Fragments(op, operand), layout(256 // k)
    if len(fragments.reads) != 4:
        raise KernelError("fragments of a wrong size")
    return lambda m, warps: np.take(elements(fragments(m, warps), dtype), order, 1).reshape(
        -1, 16, k
    )


# By the type of A: its K, the type of D, and whether signs and transposed matrices are to choose.
_FORMS = {
    "f16": (16, "f32", True, True),
    "bf16": (16, "f32", True, True),
    "e4m3": (32, "f32", True, False),
    "s8": (32, "s32", False, False),
    "u8": (32, "s32", False, False),
}
_ALIKE = {"s8": "u8", "u8": "s8"}  # may be multiplied with each other


@instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.([sf]32)\.(\w+)\.(\w+)")
def _product(op, n, k, d_type, a_type, b_type):
    n, k = int(n), int(k)
    wanted, accumulated, signs, transposable = _FORMS[a_type]
    if (k, d_type) != (wanted, accumulated) or b_type not in (a_type, _ALIKE.get(a_type)):
        raise KernelError("these types have no product")
    if n % 8 or not 8 <= n <= 256 or (d_type == "s32" and n % 16 and n not in (8, 24)):
        raise KernelError(f"products of {n} columns do not exist")
    d, a, b, adds, *more = op.operands
    a_in_registers = parts_of(a) is a
    choices = [x for x in more if isinstance(x, int)]
    if len(choices) != 2 * signs + transposable * (2 - a_in_registers):
        raise KernelError("signs and transpositions are not as many as this product has")
    sign = np.prod(choices[:2]) if signs else 1
    transposed_a, transposed_b = [0, 0, *choices[2 * signs :]][-2:]
    a = (
        _in_registers(op, a, a_type, k)
        if a_in_registers
        else _in_shared(op, a, a_type, 16, k, transposed_a, True)
    )
    b = _in_shared(op, b, b_type, n, k, transposed_b, False)
    adds, indices = op.read(adds, "pred"), [part.index for part in parts_of(d)]
    if len(indices) != n // 2:
        raise KernelError("fragments of a wrong size")
    i = np.arange(n // 2)[:, None]
    rows, columns = GROUP.T + i % 4 // 2 * 8, i // 4 * 8 + 2 * THREAD.T + i % 2

    def run(m):
        warps = m.whole_warps()
        if not len(warps):
            return
        if not m.products.fenced[warps].all():
            raise KernelError("no wgmma.fence since the last wait, whose registers may be in use")
        x, y = a(m, warps).astype("f8"), b(m, warps).astype("f8")
        added = np.broadcast_to(adds(m), m.shape)[warps][:, None]
        before = np.stack([m.products.read(index, warps) for index in indices], 1)
        before = np.where(added, before, np.uint32(0)).view(TYPES[d_type])
        sums = (sign * x @ y.swapaxes(1, 2))[:, rows, columns] + before
        for i, index in enumerate(indices):
            m.products.begin(index, warps, rounded(sums[:, i], d_type))

    return run


@instruction(r"wgmma\.fence\.sync\.aligned")
def _fence(op):
    def run(m):
        m.products.fenced[m.whole_warps()] = True

    return run


@instruction(r"wgmma\.commit_group\.sync\.aligned")
def _commit(op):
    return lambda m: m.products.commit(m.whole_warps())


@instruction(r"wgmma\.wait_group\.sync\.aligned")
def _wait(op):
    pending = op.operands[0]
    return lambda m: m.products.wait(m.whole_warps(), pending)
