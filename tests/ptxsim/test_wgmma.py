"""wgmma against products worked out by hand, B laid out as the PTX ISA draws it."""

import numpy as np
import pytest

from .ptx import KernelError
from .snippets import call
from .test_instructions import fragments, place_a_8, place_a_16

THREADS = 128
_A_AT = 8192  # in shared memory, behind B
_SETUP = """
  .reg .b32 m<64>;
  .reg .b64 address;
  mov.u32 c, dynamic;
  add.s32 d, c, b;
  st.shared.v4.b32 [d], {y0, y1, y2, y3};
"""
_SHARED_A = """
  .reg .b64 first;
  add.s32 d, c, e;
  st.shared.v4.b32 [d], {{x0, x1, x2, x3}};
  add.s32 d, c, {first_byte};
  shr.u32 d, d, 4;
  cvt.u64.u32 first, d;
  or.b64 first, first, {descriptor};
"""
_RUN = """
  fence.proxy.async.shared::cta;
  bar.sync 0;
  add.s32 c, c, {first_byte};
  shr.u32 c, c, 4;
  cvt.u64.u32 address, c;
  or.b64 address, address, {descriptor};
  setp.ne.s32 p, {adds}, 0;
  wgmma.fence.sync.aligned;
  {opcode} {{{registers}}}, {first}, address, p{more};
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned {pending};
"""


def descriptor(leading, stride, swizzle):
    """Section on the matrix descriptor: offsets in units of 16 bytes from bits 16 and 32 on."""
    return leading // 16 << 16 | stride // 16 << 32 | swizzle << 62


def multiply(
    opcode,
    a_words,
    places,
    units,
    code,
    more="",
    *,
    c=None,
    pending=0,
    places_of_a=None,
    first_byte=0,
):
    """D [64, 64] as words. units: B's 16 bytes of each thread, as words; places: where.

    a_words: A's fragments or, with places_of_a, the same of A as of B. first_byte: of B and of an A
    in shared memory, where the product starts.
    """
    names = [f"m{i}" for i in range(32)]
    inputs = {f"x{i}": a_words[:, i] for i in range(4)}
    inputs |= {f"y{i}": units[:, i] for i in range(4)}
    inputs["b"] = places
    start = [f"mov.u32 {name}, {0 if c is None else hex(c)};" for name in names]
    body = _SETUP + "\n".join(start)
    first = "{x0, x1, x2, x3}"
    if places_of_a is not None:
        inputs["e"] = _A_AT + places_of_a
        body += _SHARED_A.format(descriptor=hex(code), first_byte=_A_AT + first_byte)
        first = "first"
    body += _RUN.format(
        descriptor=hex(code),
        adds=int(c is not None),
        opcode=opcode,
        registers=", ".join(names),
        first=first,
        first_byte=first_byte,
        more=more,
        pending=pending,
    )
    out = call(body, inputs, names, threads=THREADS, shared_bytes=16384)
    d = np.zeros((64, 64), "u4")
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        for i in range(32):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            d[row, i // 4 * 8 + lane % 4 * 2 + i % 2] = out[thread, i]
    return d


def panel(rows, wide=False):
    """Of [64 rows, 32 bytes], each thread's 16 bytes as words, and where they lie in a panel."""
    units = np.ascontiguousarray(rows).view("u4").reshape(-1, 4)  # row, half
    row, half = np.arange(64).repeat(2), np.tile([0, 1], 64)
    if wide:  # a row has 128 bytes, of which these are the second 32
        return units, row * 128 + (half + 2 ^ row % 8) * 16
    return units, row * 32 + (half ^ row >> 2 & 1) * 16  # the halves change in rows 4..7


def bytes_of_panels(kind, shared_a=False, **options):
    generator = np.random.default_rng(0)
    low, high = (0, 256) if kind == "u8" else (-128, 128)
    a = generator.integers(low, high, (64, 32))
    b = generator.integers(-128, 128, (32, 64))
    units, places = panel(b.T.astype("i1"))
    if shared_a:
        words, options["places_of_a"] = panel(a.astype("u1"))
    else:
        words = np.concatenate([fragments(a[16 * w :][:16], 8, place_a_8) for w in range(4)])
    opcode = f"wgmma.mma_async.sync.aligned.m64n64k32.s32.{kind}.s8"
    d = multiply(opcode, words, places, units, descriptor(16, 8 * 32, 3), **options)
    return d.view("i4"), a @ b


@pytest.mark.parametrize("kind", ["s8", "u8"])
@pytest.mark.parametrize("shared_a", [False, True])
def test_bytes(kind, shared_a):
    d, right = bytes_of_panels(kind, shared_a)
    assert (d == right).all()


def test_adding():
    d, right = bytes_of_panels("s8", c=1000)
    assert (d == right + 1000).all()


def test_what_no_wait_has_ended_is_noise():
    d, right = bytes_of_panels("s8", pending=1)
    assert (d != right).all()


def test_unknown_layouts_are_refused(monkeypatch):
    monkeypatch.setitem(globals(), "descriptor", lambda *_: 1 << 16)
    with pytest.raises(KernelError, match="without swizzling"):
        bytes_of_panels("s8")


def halves(kind):
    """A [64, 16], B [16, 64] and their codes."""
    generator = np.random.default_rng(0)
    a, b = generator.integers(-8, 9, (64, 16)) / 4, generator.integers(-8, 9, (16, 64)) / 4
    codes = [
        x.astype("f2").view("u2") if kind == "f16" else (x.astype("f4").view("u4") >> 16)
        for x in (a, b)
    ]
    return a, b, *(x.astype("u2") for x in codes)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves(kind):
    """B's rows are of k and hold 64 numbers; units of 16 bytes change places by the row."""
    a, b, a_codes, b_codes = halves(kind)
    words = np.concatenate([fragments(a_codes[16 * w :][:16], 16, place_a_16) for w in range(4)])
    units = np.ascontiguousarray(b_codes).view("u4").reshape(-1, 4)
    row, unit = np.arange(16).repeat(8), np.tile(np.arange(8), 16)
    places = row * 128 + (unit ^ row % 8) * 16
    opcode = f"wgmma.mma_async.sync.aligned.m64n64k16.f32.{kind}.{kind}"
    code = descriptor(4096, 8 * 128, 1)
    d = multiply(opcode, words, places, units, code, ", 1, 1, 1", c=0x3F800000)
    assert (d.view("f4") == (a @ b + 1).astype("f4")).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("shared_a", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_halves_in_panels(kind, shared_a, wide):
    """B's rows are of n and hold 16 numbers, or 64 of which 16 take part; so does a shared A."""
    a, b, a_codes, b_codes = halves(kind)
    units, places = panel(b_codes.T, wide)
    opcode = f"wgmma.mma_async.sync.aligned.m64n64k16.f32.{kind}.{kind}"
    code = descriptor(16, 8 * 128, 1) if wide else descriptor(16, 8 * 32, 3)
    start = {"first_byte": 32 if wide else 0}
    if shared_a:
        words, start["places_of_a"] = panel(a_codes, wide)
        d = multiply(opcode, words, places, units, code, ", 1, 1, 0, 0", **start)
    else:
        parts = [fragments(a_codes[16 * w :][:16], 16, place_a_16) for w in range(4)]
        d = multiply(opcode, np.concatenate(parts), places, units, code, ", 1, 1, 0", **start)
    assert (d.view("f4") == (a @ b).astype("f4")).all()
