"""What the lanes of a warp do together: shuffles, votes and their barrier."""

import numpy as np

from .decode import instruction, parts_of
from .ptx import KernelError

_LANES = np.arange(32)


def _members(m, mask) -> None:
    """Refuse a call that lacks members, or is made by a lane that is none."""
    bits = np.broadcast_to(mask, m.shape)[..., None] >> np.arange(32, dtype="u4") & np.uint32(1)
    wanted = bits.astype(bool)
    if (m.mask[:, :, None] & (wanted & ~m.mask[:, None, :])).any():
        raise KernelError("a lane of the member mask is not there")
    if (m.mask & ~np.diagonal(wanted, axis1=1, axis2=2)).any():
        raise KernelError("a lane calls that is not in its member mask")


def _check_members(op, operand):
    members = op.read(operand, "u32")

    def check(m):
        mask = members(m)
        if not m.whole or (np.asarray(mask) != np.uint32(0xFFFFFFFF)).any():
            _members(m, mask)

    return check


@instruction(r"shfl\.sync\.(bfly|idx|up|down)\.b32")
def _shuffle(op, mode):
    d, a, b, c, members = op.operands
    d, valid = (*parts_of(d), None)[:2]
    put, put_valid = op.write(d, "u32"), op.write(valid, "pred")
    a, b, c = (op.read(x, "u32") for x in (a, b, c))
    check = _check_members(op, members)

    def run(m):
        check(m)
        limits = np.broadcast_to(c(m), m.shape).astype("i8")
        by = np.broadcast_to(b(m), m.shape).astype("i8") & 31
        clamp, segment = limits & 31, limits >> 8 & 31
        first = _LANES & segment
        last = first | (clamp & ~segment)
        source = {
            "bfly": _LANES ^ by,
            "idx": first | (by & ~segment),
            "up": _LANES - by,
            "down": _LANES + by,
        }[mode]
        valid = source >= last if mode == "up" else source <= last
        source = np.where(valid, source, _LANES)
        if not m.whole and (m.mask & ~np.take_along_axis(m.mask, source, 1)).any():
            raise KernelError("a lane reads from one that is not there")
        put(m, np.take_along_axis(np.broadcast_to(a(m), m.shape), source, 1))
        put_valid(m, valid)

    return run


@instruction(r"vote\.sync\.(any|all|ballot)\.(pred|b32)")
def _vote(op, mode, dtype):
    d, a, members = op.operands
    put, a, check = op.write(d, dtype), op.read(a, "pred"), _check_members(op, members)
    members = op.read(members, "u32")

    def run(m):
        check(m)
        counted = m.mask & (np.broadcast_to(members(m), m.shape) >> _LANES.astype("u4") & 1 == 1)
        votes = np.broadcast_to(a(m), m.shape)
        if mode == "ballot":
            bits = (votes & counted).astype("u4") << _LANES.astype("u4")
            result = np.bitwise_or.reduce(bits, 1)
        elif mode == "any":
            result = (votes & counted).any(1)
        else:
            result = (votes | ~counted).all(1)
        put(m, np.broadcast_to(result[:, None], m.shape))

    return run


@instruction(r"bar\.warp\.sync")
def _sync(op):
    return _check_members(op, op.operands[0])
