"""Loads, stores, asynchronous copies and ldmatrix."""

import numpy as np

from .decode import TYPES, address, by_lane, instruction, parts_of, read_parts, write_parts
from .ptx import KernelError

_KIND = r"(?:\.v[24])?\.([busf]\d+)"


# A generic address is one of global memory: what makes one of shared memory is unknown here.
@instruction(r"ld(\.shared|\.param|\.global(?:\.nc)?|)" + _KIND)
def _load(space, dtype, d, source):
    put, at = write_parts(d, dtype), address(source)
    size, count = TYPES[dtype].itemsize, len(parts_of(d))

    def run(m):
        addresses = m.active(at(m))
        if space == ".shared":
            values = m.shared.load(m.active(m.warp_of_lane), addresses, size, count)
        else:
            values = (m.parameters if space == ".param" else m.tensors).load(addresses, size, count)
        put(m, values.view(TYPES[dtype]))

    return run


@instruction(r"st(\.shared|\.global|)" + _KIND)
def _store(space, dtype, target, a):
    at, parts = address(target), read_parts(a, f"b{8 * TYPES[dtype].itemsize}")

    def run(m):
        if space == ".shared":
            m.shared.store(m.active(m.warp_of_lane), m.active(at(m)), parts(m))
        else:
            m.tensors.store(m.active(at(m)), parts(m))

    return run


@instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _load_matrices(count, transposed, d, source):
    """Lane i of the first 8 per matrix gives the address of row i % 8 of matrix i / 8. Lane i gets
    elements 2 (i % 4) and the next of row i / 4, of column i / 4 where transposed."""
    count, put, at = int(count), write_parts(d, "u32"), address(source)
    if len(parts_of(d)) != count:
        raise KernelError(f"{len(parts_of(d))} registers for {count} matrices")

    def run(m):
        warps = m.whole_warps()
        rows = m.active(at(m)).reshape(-1, 32)[:, : 8 * count]
        words = m.shared.load(warps.repeat(8 * count), rows.ravel(), 4, 4)
        if transposed:
            halves = words.view("u2").reshape(-1, 8, 8).swapaxes(1, 2)
            words = np.ascontiguousarray(halves).view("u4")
        put(m, words.reshape(-1, count, 32).swapaxes(1, 2).reshape(-1, count))

    return run


# ----------------------------------------------------------------------------- asynchronous copies
@instruction(r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::\d+B)?")
def _copy(target, source, size):
    if not isinstance(size, int):
        raise KernelError("the size of a copy must be a constant here")
    target, source = address(target), address(source)
    return lambda m: m.copies.begin(m.active(target(m)), m.active(source(m)), size)


@instruction(r"cp\.async\.(commit_group|wait_group|wait_all)")
def _order(step, *pending):
    return lambda m: getattr(m.copies, step)(*pending)


by_lane(
    r"cp\.async\.bulk\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes",
    "[] [] u32 []",
    lambda m, *numbers: m.copies.begin_bulk(*numbers),
)


@instruction(r"fence\.proxy\.async(?:\.shared::cta)?")
def _fence():
    return lambda m: m.races.fence(np.flatnonzero(m.mask.any(1)))


@instruction(
    r"(?:fence(?!\.proxy)|membar)(?:\.\w+(?:::\w+)?)*|setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32"
)
def _nothing(*counts):
    """Order among memory accesses, which are in order here, and counts of registers."""
    return lambda m: None
