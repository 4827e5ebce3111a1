"""wgmma: products of a warpgroup's matrices A and B, with D in registers (PTX ISA, section 9.7.15).

Each warp has 16 rows of A and D, in fragments like those of mma.sync; B, and A if it likes, lies in
shared memory, is read when a product begins, and once more, for nothing but errors, when a wait has
ended the product's group: whoever gives it back too early is found out. So is whoever reads D too
early, as it holds noise until then.
"""

from collections import defaultdict

import numpy as np

from .decode import TYPES, instruction, parts_of, read
from .matrix import check_form, elements, fragments, layout, layout_of_sums, rounded
from .ptx import KernelError

_NOISE = np.uint32(0x7FC0DEAD)  # a NaN, or a large integer


class Products:
    """What D will hold once the products under way have ended."""

    def __init__(self, machine):
        self._m, (warps, _) = machine, machine.shape
        self._values = defaultdict(lambda: np.zeros(machine.shape, "u4"))  # by register
        self._group = defaultdict(lambda: np.full(warps, -1))  # by register, -1: none is under way
        self._committed = np.zeros(warps, "i8")
        self._operands = []  # in shared memory: warps, addresses, groups [n]
        self.fenced = np.zeros(warps, bool)  # since their last wait

    def read(self, index: int, warps: np.ndarray) -> np.ndarray:
        """What the register will hold, [warps, 32]."""
        under_way = self._group[index][warps, None] >= 0
        return np.where(under_way, self._values[index][warps], self._m.registers[index][warps])

    def begin(self, index: int, warps: np.ndarray, values: np.ndarray) -> None:
        self._values[index][warps] = values.view("u4")
        self._group[index][warps] = self._committed[warps]
        self._set(index, warps, _NOISE)

    def read_shared(self, warps: np.ndarray, addresses: np.ndarray) -> np.ndarray:
        """16 bytes each, of an operand of a product that begins: [n, 4]."""
        self._operands.append((warps, addresses, self._committed[warps]))
        return self._m.shared.load(warps, addresses, 4, 4, by_proxy=True)

    def _set(self, index: int, warps: np.ndarray, values) -> None:
        self._m.registers[index] = self._m.registers[index].copy()
        self._m.registers[index][warps] = values

    def fence(self, warps: np.ndarray) -> None:
        self.fenced[warps] = True

    def commit_group(self, warps: np.ndarray) -> None:
        self._committed[warps] += 1

    def wait_group(self, warps: np.ndarray, pending: int) -> None:
        self.fenced[warps] = False
        for index, group in self._group.items():
            mine = group[warps]
            ended = warps[(mine >= 0) & (mine < self._committed[warps] - pending)]
            if len(ended):
                self._set(index, ended, self._values[index][ended])
                group[ended] = -1
        operands, self._operands = self._operands, []
        for by, addresses, group in operands:
            ended = np.isin(by, warps) & (group < self._committed[by] - pending)
            self._m.shared.load(by[ended], addresses[ended], 4, 4, by_proxy=True)
            if not ended.all():
                self._operands.append((by[~ended], addresses[~ended], group[~ended]))


_START, _LEADING, _STRIDE, _SWIZZLE = 0, 16, 32, 62  # first bits of a descriptor's fields
_UNKNOWN = np.uint64(0x3FFFC000C000C000)  # a descriptor's other bits; of its base offset also
_SWIZZLED_BITS = np.array([0, 3, 2, 1])  # of a row's number, by the descriptor's kind of swizzling


def _descriptor(m, lanes):
    """Start address, leading and stride offset in bytes, and swizzled bits: [warps, 1, 1] each."""
    lanes = m.active(lanes).reshape(-1, 32)
    if (lanes != lanes[:, :1]).any():
        raise KernelError("lanes of a warp disagree on a descriptor")
    if (lanes & _UNKNOWN).any():
        raise KernelError(f"descriptor {lanes[0, 0]:#x} sets bits that are unknown here")
    bits = lanes[:, 0].astype("i8").reshape(-1, 1, 1)
    fields = [(bits >> first & 0x3FFF) * 16 for first in (_START, _LEADING, _STRIDE)]
    return *fields, _SWIZZLED_BITS[bits >> _SWIZZLE & 3]


def _in_shared(operand, dtype, rows, k, transposed, by_warp=False):
    """A function of the machine and warps: ``rows`` of A or columns of B, [warps, rows, k].

    by_warp: each warp of a warpgroup has rows of its own.

    Shared memory has rows of 16-byte units: one of M or N with K along it, or one of K where
    ``transposed``. Eight rows of as many units as swizzling mixes (one without it) follow each
    other; the offsets are from there on.
    """
    descriptor = read(operand, "u64")

    def fetch(m, warps):
        start, leading, stride, bits = _descriptor(m, descriptor(m))
        mine = (warps[:, None] % m.per_block % 4 * rows * by_warp) + np.arange(rows)
        if transposed:
            row, unit = np.arange(k)[:, None], mine[:, None, ::8] // 8
            # Without swizzling the offsets are of the dimensions, else of rows and units.
            leading, stride = (np.where(bits, *x) for x in ((leading, stride), (stride, leading)))
        else:
            row, unit = mine[:, :, None], np.arange(2)
        at = start + leading * (unit >> bits) + stride * (row // 8)
        at = at + (((row % 8) << bits) + (unit & (1 << bits) - 1)) * 16
        at ^= (at >> 7 & (1 << bits) - 1) << 4
        words = m.products.read_shared(warps.repeat(at[0].size), at.ravel())
        values = elements(words.reshape(len(warps), -1), dtype)
        if transposed:
            return values.reshape(-1, k, rows).swapaxes(1, 2)
        return values.reshape(-1, rows, k)

    return fetch


def _in_registers(operand, dtype, k):
    words, (order, _) = fragments(operand, 4), layout(k)
    return lambda m, warps: elements(words(m), dtype)[:, order].reshape(-1, 16, k)


@instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.([sf]32)\.(\w+)\.(\w+)")
def _product(n, k, d_type, a_type, b_type, d, a, b, adds, *more):
    n, k = int(n), int(k)
    check_form(k, d_type, a_type, b_type)
    if n % 8 or not 8 <= n <= 256 or (d_type == "s32" and n % 16 and n not in (8, 24)):
        raise KernelError(f"products of {n} columns do not exist")
    # Signs are to choose of floating-point numbers, transposed matrices in memory of halves.
    in_registers, signs = type(a) is tuple, 2 * (d_type == "f32")
    if len(more) != signs + (k == 16) * (2 - in_registers):
        raise KernelError("signs and transpositions are not as many as this product has")
    sign = np.prod(more[:signs])
    transposed_a, transposed_b = (0, 0, *more[signs:])[-2:]
    if in_registers:
        a = _in_registers(a, a_type, k)
    else:
        a = _in_shared(a, a_type, 16, k, transposed_a, by_warp=True)
    b = _in_shared(b, b_type, n, k, transposed_b)
    adds, indices = read(adds, "pred"), [part.index for part in parts_of(d)]
    if len(indices) != n // 2:
        raise KernelError("fragments of a wrong size")
    rows, columns = layout_of_sums(n)

    def run(m):
        warps = m.whole_warps()
        if not m.products.fenced[warps].all():
            raise KernelError("no wgmma.fence since the last wait, whose registers may be in use")
        x, y = a(m, warps).astype("f8"), b(m, warps).astype("f8")
        before = np.stack([m.products.read(index, warps) for index in indices], -1)
        added = m.active(adds(m)).reshape(-1, 32, 1)
        before = np.where(added, before, np.uint32(0)).view(TYPES[d_type])
        sums = (sign * x @ y.swapaxes(1, 2))[:, rows, columns] + before
        for i, index in enumerate(indices):
            m.products.begin(index, warps, rounded(sums[..., i], d_type))

    return run


@instruction(r"wgmma\.(fence|commit_group|wait_group)\.sync\.aligned")
def _order(step, *pending):
    return lambda m: getattr(m.products, step)(m.whole_warps(), *pending)
