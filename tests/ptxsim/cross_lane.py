"""What the lanes of a warp do together: shuffles, transposition, votes and their barrier."""

import numpy as np

from .decode import instruction, parts_of, read, write
from .ptx import KernelError

_LANES = np.arange(32)


def _bits(lanes: np.ndarray) -> np.ndarray:
    """[warps, 32] of bool as words [warps, 1]."""
    return np.packbits(lanes, 1, "little").view("u4")


def _members(operand):
    """A function of the machine: member masks, all of whose lanes are there and no others call."""
    members = read(operand, "u32")

    def checked(m):
        masks = members(m)
        if (m.mask & (masks & ~_bits(m.mask) != 0)).any():
            raise KernelError("a lane of the member mask is not there")
        if (m.mask & (masks >> _LANES.astype("u4") & 1 == 0)).any():
            raise KernelError("a lane calls that is not in its member mask")
        return masks

    return checked


@instruction(r"shfl\.sync\.(bfly|idx|up|down)\.b32")
def _shuffle(mode, d, a, b, c, members):
    d, valid = (*parts_of(d), None)[:2]
    put, put_valid, check = write(d, "u32"), write(valid, "pred"), _members(members)
    a, b, c = (read(x, "u32") for x in (a, b, c))

    def run(m):
        check(m)
        by, limits = b(m).astype("i8") & 31, c(m).astype("i8")
        clamp, segment = limits & 31, limits >> 8 & 31
        first = _LANES & segment
        last = first | (clamp & ~segment)
        source = {
            "bfly": _LANES ^ by,
            "idx": first | (by & ~segment),
            "up": _LANES - by,
            "down": _LANES + by,
        }[mode]
        valid = np.broadcast_to(source >= last if mode == "up" else source <= last, m.shape)
        source = np.where(valid, source, _LANES)
        if (m.mask & ~np.take_along_axis(m.mask, source, 1)).any():
            raise KernelError("a lane reads from one that is not there")
        put(m, np.take_along_axis(np.broadcast_to(a(m), m.shape), source, 1))
        put_valid(m, valid)

    return run


@instruction(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16")
def _transpose(d, a):
    """Of each warp's matrix [8, 8], lane i has elements 2 (i % 4) and the next of row i / 4."""
    put, a = write(d, "u32"), read(a, "u32")

    def run(m):
        m.whole_warps()
        words = np.ascontiguousarray(np.broadcast_to(a(m), m.shape))
        columns = words.view("u2").reshape(-1, 8, 8).swapaxes(1, 2)
        put(m, np.ascontiguousarray(columns).view("u4").reshape(m.shape))

    return run


@instruction(r"vote\.sync\.(any|all|ballot)\.(pred|b32)")
def _vote(mode, dtype, d, a, members):
    put, a, members = write(d, dtype), read(a, "pred"), _members(members)

    def run(m):
        masks = members(m)
        ballot = _bits(m.mask & a(m)) & masks
        put(m, {"ballot": ballot, "any": ballot != 0, "all": ballot == masks}[mode])

    return run


@instruction(r"bar\.warp\.sync")
def _sync(members):
    return _members(members)
