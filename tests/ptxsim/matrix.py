"""mma.sync: products of matrices that a warp's lanes hold in fragments.

Which lane holds what is from the PTX ISA's section on matrix fragments, where a lane is
4 groupID + threadID_in_group. Sums are of FP64 and rounded once; those of integers are exact.
"""

import numpy as np

from .decode import TYPES, instruction, parts_of, read_parts, write_parts
from .ptx import KernelError

_GROUP, _THREAD = np.arange(32)[:, None] // 4, np.arange(32)[:, None] % 4
# What is multiplied: k of the products, and the type of their sums.
_FORMS = {"f16": (16, "f32"), "bf16": (16, "f32"), "e4m3": (32, "f32")}
_FORMS |= {"s8": (32, "s32"), "u8": (32, "s32")}


def check_form(k: int, d_type: str, a_type: str, b_type: str) -> None:
    alike = a_type == b_type or {a_type, b_type} == {"s8", "u8"}
    if not alike or _FORMS.get(a_type) != (k, d_type):
        raise KernelError("these types have no product")


def layout(k: int):
    """For A [16, k] and B [k, 8], whose elements have 256 / k bits, the place of each element.

    Answers, for each element of the row-major matrix, where it lies among [32 lanes, elements].
    """
    per_word = k // 8
    i = np.arange(4 * per_word)
    word = i // per_word
    inner = _THREAD * per_word + i % per_word  # of the reduced dimension
    places_a = (_GROUP + 8 * (word % 2)) * k + inner + k // 2 * (word // 2)
    places_b = ((inner + k // 2 * word) * 8 + _GROUP)[:, : 2 * per_word]
    return np.argsort(places_a.ravel()), np.argsort(places_b.ravel())


def layout_of_sums(n: int):
    """Rows and columns of D [16, n], [32 lanes, n / 2] each."""
    i = np.arange(n // 2)
    return _GROUP + i // 2 % 2 * 8, i // 4 * 8 + 2 * _THREAD + i % 2


def elements(words: np.ndarray, dtype: str) -> np.ndarray:
    """[warps, words] as [warps, elements] of their type."""
    if dtype == "e2m1":
        codes = words.view("u1")
        words = np.stack([codes & 15, codes >> 4], -1).reshape(len(words), -1)
    return words.view(TYPES[dtype])


def fragments(operand, registers: int, dtype: str = "u32"):
    """A function of the machine: [warps, 32 lanes * registers]."""
    if len(parts_of(operand)) != registers:
        raise KernelError("fragments of a wrong size")
    parts = read_parts(operand, dtype)
    return lambda m: parts(m).reshape(-1, 32 * registers)


def rounded(sums: np.ndarray, dtype: str) -> np.ndarray:
    """FP64 as FP32, or as integers of 32 bits, which overflow."""
    return sums.astype("f4") if dtype == "f32" else sums.astype("i8").astype("i4")


def _multiply(k, d_type, a_type, b_type, operands, scale=None):
    d, a, b, c = operands
    a, b, c = fragments(a, 4), fragments(b, 2), fragments(c, 4, d_type)
    put, (order_a, order_b) = write_parts(d, d_type), layout(k)
    rows, columns = layout_of_sums(8)

    def run(m):
        m.whole_warps()
        x = elements(a(m), a_type)[:, order_a].reshape(-1, 16, k).astype("f8")
        y = elements(b(m), b_type)[:, order_b].reshape(-1, k, 8).astype("f8")
        if scale:
            x, y = scale(m, x, y)
        sums = (x @ y)[:, rows, columns].reshape(-1, 128) + c(m)
        put(m, rounded(sums, d_type).reshape(-1, 4))

    return run


@instruction(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.([fs]32)\.(\w+)\.(\w+)\.\2")
def _product(k, d_type, a_type, b_type, *operands):
    check_form(int(k), d_type, a_type, b_type)
    return _multiply(int(k), d_type, a_type, b_type, operands)


@instruction(
    r"mma\.sync\.aligned\.kind::mxf4nvf4\.block_scale\.scale_vec::4X\.m16n8k64\.row\.col"
    r"\.f32\.e2m1\.e2m1\.f32\.ue4m3"
)
def _scaled_product(d, a, b, c, scales_a, selector_a, scales_b, selector_b):
    """Four scales per row of A and column of B, the first in the low byte of a lane's word.

    PTX ISA, section 9.7.14.3, block scaling: selectors are {byte, thread}. Of A, thread 0 or 1
    chooses the lower or upper pair of the four lanes of a group: the first one's word is for row
    groupID, the second one's for row groupID + 8 (figure 43). Of B, thread 0 to 3 chooses the lane
    whose word is for column groupID (figure 44). With four scales a word the byte is 0 (table 37).
    """
    rows, columns = np.arange(16), np.arange(8)
    lanes_a = 4 * (rows % 8) + 2 * np.arange(2)[:, None] + rows // 8  # [threads, rows]
    lanes_b = 4 * columns + np.arange(4)[:, None]
    by_row = _chosen_scales(scales_a, selector_a, lanes_a)
    by_column = _chosen_scales(scales_b, selector_b, lanes_b)

    def scale(m, x, y):
        return x * by_row(m), y * by_column(m).swapaxes(1, 2)

    return _multiply(64, "f32", "e2m1", "e2m1", (d, a, b, c), scale)


def _chosen_scales(operand, selector, lanes: np.ndarray):
    """A function of the machine: scales [warps, rows or columns, 64] of ``lanes`` by thread."""
    if selector not in [(0, thread) for thread in range(len(lanes))]:
        raise KernelError(f"selector {selector} of scales, constants {{0, thread}} are understood")
    words, lanes = fragments(operand, 1), lanes[selector[1]]

    def read(m):
        codes = words(m)[:, lanes, None].view("u1")
        if (codes & 0x80).any():
            raise KernelError("a scale has a sign")
        return codes.view(TYPES["e4m3"]).astype("f8").repeat(16, 2)

    return read
