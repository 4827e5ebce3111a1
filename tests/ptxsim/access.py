"""Loads, stores, asynchronous copies and ldmatrix."""

import numpy as np

from .decode import TYPES, instruction, parts_of
from .ptx import KernelError

_KIND = r"(?:\.v[24])?\.([busf]\d+)"


def _place(m, addresses, size, access):
    """Places in shared memory; ``access`` is how races.py hears of it."""
    places = m.shared.place(addresses, m.active(m.block_of_lane), size)
    access(m.active(m.warp_of_lane), places, size)
    return places


def _load_shared(m, addresses, size, count):
    return m.shared.load(_place(m, addresses, size * count, m.races.read), size, count)


def _load_parameter(m, addresses, size, count):
    places = addresses.astype("i8")
    if (places % (size * count)).any() or (places + size * count > len(m.parameters)).any():
        raise KernelError(f"a wrong place in the kernel's parameter: {places[0]}")
    return m.parameters[places[:, None] + np.arange(size * count)].view(f"u{size}")


def _load_global(m, addresses, size, count):
    return m.tensors.load(addresses, size, count)


_LOADS = {".shared": _load_shared, ".param": _load_parameter}


# A generic address is one of global memory: what makes one of shared memory is unknown here.
@instruction(r"ld(\.shared|\.param|\.global(?:\.nc)?|)" + _KIND)
def _load(op, space, dtype):
    parts, address = parts_of(op.operands[0]), op.address(op.operands[1])
    puts, size = [op.write(part, dtype) for part in parts], TYPES[dtype].itemsize
    load = _LOADS.get(space, _load_global)

    def run(m):
        if m.anyone:
            values = load(m, m.active(address(m)), size, len(parts)).view(TYPES[dtype])
            for i, put in enumerate(puts):
                put(m, m.spread(values[:, i]))

    return run


@instruction(r"st(\.shared|\.global|)" + _KIND)
def _store(op, space, dtype):
    address, bits = op.address(op.operands[0]), f"b{8 * TYPES[dtype].itemsize}"
    parts = [op.read(part, bits) for part in parts_of(op.operands[1])]

    def run(m):
        if m.anyone:
            addresses = m.active(address(m))
            values = np.stack([m.active(part(m)) for part in parts], 1)
            if space == ".shared":
                m.shared.store(_place(m, addresses, values[0].nbytes, m.races.write), values)
            else:
                m.tensors.store(addresses, values)

    return run


def load_rows(m, warps: np.ndarray, addresses: np.ndarray, by_proxy=False) -> np.ndarray:
    """Sixteen bytes of shared memory at each of ``addresses`` [warps, ...]: words [..., 4]."""
    by = np.repeat(warps, addresses[0].size)
    places = m.shared.place(addresses.ravel(), m.block_of_warp[by], 16)
    m.races.read(by, places, 16, by_proxy)
    return m.shared.load(places, 4, 4).reshape(*addresses.shape, 4)


@instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _load_matrices(op, count, transposed):
    """Lane i of the first 8 per matrix gives the address of row i % 8 of matrix i / 8. Lane i gets
    elements 2 (i % 4) and the next of row i / 4, of column i / 4 where transposed."""
    count, lane = int(count), np.arange(32)
    puts = [op.write(part, "u32") for part in parts_of(op.operands[0])]
    address = op.address(op.operands[1])

    def run(m):
        warps = m.whole_warps()
        if not len(warps):
            return
        rows = np.broadcast_to(address(m), m.shape)[warps, : 8 * count]
        words = load_rows(m, warps, rows).reshape(-1, count, 8, 4)
        if transposed:
            halves = np.ascontiguousarray(words).view("u2").swapaxes(2, 3)
            words = np.ascontiguousarray(halves).view("u4")
        for i, put in enumerate(puts):
            m.put_warps(put, warps, words[:, i][:, lane // 4, lane % 4])

    return run


# ----------------------------------------------------------------------------- asynchronous copies
@instruction(r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::\d+B)?")
def _copy(op):
    target, source, size, *part = op.operands
    if not isinstance(size, int):
        raise KernelError("the size of a copy must be a constant here")
    target, source = op.address(target), op.address(source)
    part = op.read(part[0] if part else size, "u32")

    def run(m):
        if m.anyone:
            m.copies.begin(*(m.active(x(m)) for x in (target, source, part)), size)

    return run


@instruction(r"cp\.async\.commit_group")
def _commit(op):
    return lambda m: m.copies.commit()


@instruction(r"cp\.async\.(?:wait_group|wait_all)")
def _wait(op):
    everything = not op.operands
    pending = 0 if everything else op.operands[0]

    def run(m):
        if everything:
            m.copies.commit()
        m.copies.wait(pending)

    return run


@instruction(r"cp\.async\.bulk\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes")
def _copy_in_bulk(op):
    target, source, size, barrier = op.operands
    reads = op.address(target), op.address(source), op.read(size, "u32"), op.address(barrier)

    def run(m):
        for warp, _, *numbers in m.each(*(read(m) for read in reads)):
            m.copies.begin_bulk(warp, *numbers)

    return run


@instruction(r"fence\.proxy\.async(?:\.shared::cta)?")
def _fence(op):
    return lambda m: m.races.fence(np.flatnonzero(m.mask.any(1)))


@instruction(
    r"(?:fence(?!\.proxy)|membar)(?:\.\w+(?:::\w+)?)*|setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32"
)
def _nothing(op):
    """Order among memory accesses, which are in order here, and counts of registers."""
    return lambda m: None
