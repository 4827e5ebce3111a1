"""mma.sync: products of matrices that a warp's lanes hold in fragments.

Which lane holds what is from the PTX ISA's section on matrix fragments, where a lane is
4 groupID + threadID_in_group. Sums are of FP64 and rounded once; those of integers are exact.
"""

import numpy as np

from .conversions import E2M1_VALUES, E4M3_VALUES
from .decode import TYPES, instruction, parts_of
from .ptx import KernelError

GROUP, THREAD = np.arange(32)[:, None] // 4, np.arange(32)[:, None] % 4


def layout(bits: int):
    """For A [16, k] and B [k, 8] with k of 256 / bits, the place of each lane's elements.

    Answers, for each element of the row-major matrix, where it lies among [32 lanes, elements].
    """
    per_word, k = 32 // bits, 256 // bits
    i = np.arange(4 * per_word)
    word = i // per_word
    inner = THREAD * per_word + i % per_word  # of the reduced dimension
    row_a, col_a = GROUP + 8 * (word % 2), inner + k // 2 * (word // 2)
    i = i[: 2 * per_word]
    row_b = inner[:, : 2 * per_word] + k // 2 * (i // per_word)
    places_a = row_a * k + col_a
    places_b = row_b * 8 + np.broadcast_to(GROUP, row_b.shape)
    return np.argsort(places_a.ravel()), np.argsort(places_b.ravel())


_D = (GROUP + 8 * (np.arange(4) // 2)) * 8 + 2 * THREAD + np.arange(4) % 2  # [32, 4]


def elements(words: np.ndarray, dtype: str) -> np.ndarray:
    """[n, 32, registers] of words as [n, 32 * elements] of FP64."""
    flat = words.reshape(len(words), -1)
    if dtype == "e2m1":
        codes = flat.view("u1")
        return E2M1_VALUES[np.stack([codes & 15, codes >> 4], -1).reshape(len(words), -1)]
    if dtype == "e4m3":
        return E4M3_VALUES[flat.view("u1")]
    return flat.view(TYPES[dtype])


def rounded(sums: np.ndarray, dtype: str) -> np.ndarray:
    """FP64 as FP32, or as integers of 32 bits, which overflow."""
    return sums.astype("f4") if dtype == "f32" else sums.astype("i8").astype("i4")


class Fragments:
    def __init__(self, op, operand, dtype: str = "u32"):
        self.reads = [op.read(part, dtype) for part in parts_of(operand)]

    def __call__(self, m, warps) -> np.ndarray:
        """[warps, 32 lanes, registers]"""
        return np.stack([np.broadcast_to(x(m), m.shape)[warps] for x in self.reads], -1)


def _multiply(op, a_type, b_type, d_type, bits, scale=None):
    d, a, b, c = op.operands[:4]
    puts = [op.write(part, d_type) for part in parts_of(d)]
    a, b, c = Fragments(op, a), Fragments(op, b), Fragments(op, c, d_type)
    if (len(a.reads), len(b.reads), len(c.reads), len(puts)) != (4, 2, 4, 4):
        raise KernelError("fragments of a wrong size")
    order_a, order_b = layout(bits)
    k = 256 // bits

    def run(m):
        warps = m.whole_warps()
        x = np.take(elements(a(m, warps), a_type), order_a, 1).reshape(-1, 16, k).astype("f8")
        y = np.take(elements(b(m, warps), b_type), order_b, 1).reshape(-1, k, 8).astype("f8")
        if scale:
            x, y = scale(m, warps, x, y)
        products = (x @ y).reshape(-1, 128)[:, _D]
        sums = rounded(products + c(m, warps), d_type)
        for i, put in enumerate(puts):
            m.put_warps(put, warps, sums[..., i])

    return run


@instruction(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16|bf16)\.\1\.f32")
def _halves(op, dtype):
    return _multiply(op, dtype, dtype, "f32", 16)


@instruction(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.([su]8)\.([su]8)\.s32")
def _bytes(op, a_type, b_type):
    return _multiply(op, a_type, b_type, "s32", 8)


@instruction(r"mma\.sync\.aligned\.m16n8k32\.row\.col(?:\.kind::f8f6f4)?\.f32\.e4m3\.e4m3\.f32")
def _small(op):
    return _multiply(op, "e4m3", "e4m3", "f32", 8)


@instruction(
    r"mma\.sync\.aligned\.kind::mxf4nvf4\.block_scale\.scale_vec::4X\.m16n8k64\.row\.col"
    r"\.f32\.e2m1\.e2m1\.f32\.ue4m3"
)
def _scaled(op):
    """Four scales per row of A and column of B, the first in the low byte of a lane's word.

    PTX ISA, section 9.7.14.3, block scaling: selectors are {byte, thread}. Of A, thread 0 or 1
    chooses the lower or upper pair of the four lanes of a group: the first one's word is for row
    groupID, the second one's for row groupID + 8 (figure 43). Of B, thread 0 to 3 chooses the lane
    whose word is for column groupID (figure 44). With four scales a word the byte is 0 (table 37).
    """
    scales_a, selector_a, scales_b, selector_b = op.operands[4:]
    pair, lane_b = _selected(selector_a, 2), _selected(selector_b, 4)
    scales_a, scales_b = Fragments(op, scales_a), Fragments(op, scales_b)
    rows = np.arange(16)
    lanes_a = 4 * (rows % 8) + 2 * pair + rows // 8
    lanes_b = 4 * np.arange(8) + lane_b

    def scale(m, warps, x, y):
        words_a, words_b = scales_a(m, warps)[:, lanes_a], scales_b(m, warps)[:, lanes_b]
        if ((words_a | words_b[:, rows % 8]) & np.uint32(0x80808080)).any():
            raise KernelError("a scale has a sign")
        by_row = E4M3_VALUES[np.ascontiguousarray(words_a).view("u1")]  # [n, 16, 4]
        by_column = E4M3_VALUES[np.ascontiguousarray(words_b).view("u1")]  # [n, 8, 4]
        return x * by_row.repeat(16, 2), y * by_column.repeat(16, 2).swapaxes(1, 2)

    return _multiply(op, "e2m1", "e2m1", "f32", 4, scale)


def _selected(selector, choices: int) -> int:
    if selector not in [(0, thread) for thread in range(choices)]:
        raise KernelError(f"selector {selector} of scales, constants {{0, thread}} are understood")
    return selector[1]
