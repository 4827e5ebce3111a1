"""Loads, stores, asynchronous copies and ldmatrix."""

import numpy as np

from .decode import TYPES, Op, instruction
from .ptx import Immediate, KernelError, Register, Vector

_KIND = r"(?:\.(v2|v4))?\.([busf]\d+)"


def _parts(operand) -> tuple:
    return operand.parts if isinstance(operand, Vector) else (operand,)


def _lanes(m, array):
    """The values of ``array`` in active lanes, [n]."""
    array = np.asarray(array)
    if array.shape != m.shape:
        array = np.broadcast_to(array, m.shape)
    return array.ravel() if m.everyone else array[m.mask]


def _spread(m, values):
    """The inverse: [warps, 32] with ``values`` [n] in active lanes."""
    if m.everyone:
        return values.reshape(m.shape)
    result = np.zeros(m.shape, values.dtype)
    result[m.mask] = values
    return result


def _place(m, address, size, access):
    """Places in shared memory; ``access`` is how races.py hears of it."""
    places = m.shared.place(_lanes(m, address), _lanes(m, m.block_of_lane), size)
    access(_lanes(m, m.warp_of_lane), places, size)
    return places


def _loading(op: Op, dtype: str, fetch):
    """``fetch(machine, bytes of an element, elements)`` gives [n, elements] for active lanes."""
    parts = _parts(op.operands[0])
    puts, size = [op.write(part, dtype) for part in parts], TYPES[dtype].itemsize

    def run(m):
        if not m.anyone:
            return
        values = fetch(m, size, len(parts)).view(TYPES[dtype])
        for i, put in enumerate(puts):
            put(m, _spread(m, values[:, i]))

    return run


# A generic address is one of global memory: what makes one of shared memory is unknown here.
@instruction(r"ld(?:\.global(?:\.nc)?)?" + _KIND)
def _load_global(op, _, dtype):
    address = op.address(op.operands[1], "u64")
    return _loading(op, dtype, lambda m, *shape: m.tensors.load(_lanes(m, address(m)), *shape))


@instruction(r"ld\.shared" + _KIND)
def _load_shared(op, _, dtype):
    address = op.address(op.operands[1], "u32")

    def fetch(m, size, count):
        return m.shared.load(_place(m, address(m), size * count, m.races.read), size, count)

    return _loading(op, dtype, fetch)


@instruction(r"ld\.param" + _KIND)
def _load_parameter(op, _, dtype):
    address = op.operands[1]
    # Addresses in this space are the same in all lanes: they come from the kernel's one parameter.
    register = isinstance(address.base, Register)
    place = op.address(address, f"u{8 * address.base.bytes}" if register else "u64")

    def fetch(m, size, count):
        places = _lanes(m, place(m)).astype("i8")
        if (places % (size * count)).any() or (places + size * count > len(m.parameters)).any():
            raise KernelError(f"a wrong place in the kernel's parameter: {places[0]}")
        index = places[:, None] + np.arange(size * count)
        return m.parameters[index].view(f"u{size}")

    return _loading(op, dtype, fetch)


def _values(op: Op, operand, dtype: str):
    """A function of the machine: what active lanes store, [n, elements]."""
    parts = [op.read(part, f"b{8 * TYPES[dtype].itemsize}") for part in _parts(operand)]
    return lambda m: np.stack([_lanes(m, part(m)) for part in parts], 1)


@instruction(r"st(?:\.global)?" + _KIND)
def _store_global(op, _, dtype):
    address = op.address(op.operands[0], "u64")
    values = _values(op, op.operands[1], dtype)

    def run(m):
        if m.anyone:
            m.tensors.store(_lanes(m, address(m)), values(m))

    return run


@instruction(r"st\.shared" + _KIND)
def _store_shared(op, _, dtype):
    address = op.address(op.operands[0], "u32")
    values = _values(op, op.operands[1], dtype)

    def run(m):
        if m.anyone:
            stored = values(m)
            m.shared.store(_place(m, address(m), stored[0].nbytes, m.races.write), stored)

    return run


@instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _load_matrices(op, count, transposed):
    """Lane i of the first 8 per matrix gives the address of row i % 8 of matrix i / 8. Lane i gets
    elements 2 (i % 4) and the next of row i / 4, of column i / 4 where transposed."""
    count = int(count)
    puts = [op.write(part, "u32") for part in _parts(op.operands[0])]
    address = op.address(op.operands[1], "u32")
    lane = np.arange(32)

    def run(m):
        warps = m.whole_warps()
        rows = np.broadcast_to(address(m), m.shape)[warps, : 8 * count]
        by = np.repeat(warps, 8 * count)
        places = m.shared.place(rows.ravel(), m.block_of_warp[by], 16)
        m.races.read(by, places, 16)
        words = m.shared.load(places, 4, 4).reshape(-1, count, 8, 4)
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
    if not isinstance(size, Immediate):
        raise KernelError("the size of a copy must be a constant here")
    target, source = op.address(target, "u32"), op.address(source, "u64")
    part = op.read(part[0] if part else size, "u32")

    def run(m):
        operands = (np.broadcast_to(x(m), m.shape) for x in (target, source, part))
        m.copies.begin(*operands, size.bits)

    return run


@instruction(r"cp\.async\.commit_group")
def _commit(op):
    return lambda m: m.copies.commit()


@instruction(r"cp\.async\.(?:wait_group|wait_all)")
def _wait(op):
    everything = not op.operands
    pending = 0 if everything else op.operands[0].bits

    def run(m):
        if everything:
            m.copies.commit()
        m.copies.wait(pending)

    return run


@instruction(r"cp\.async\.bulk\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes")
def _copy_in_bulk(op):
    target, source, size, barrier = op.operands
    target, barrier = op.address(target, "u32"), op.address(barrier, "u32")
    source, size = op.address(source, "u64"), op.read(size, "u32")

    def run(m):
        operands = (target(m), source(m), size(m), barrier(m))
        for warp, lane in np.argwhere(m.mask):
            m.copies.begin_bulk(
                warp, *(int(np.broadcast_to(x, m.shape)[warp, lane]) for x in operands)
            )

    return run


@instruction(r"(?:fence|membar)(?:\.\w+(?:::\w+)?)*|setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32")
def _nothing(op):
    """Order among memory accesses, which are in order here, and counts of registers."""
    return lambda m: None
