"""Each instruction against vectors worked out by hand from the PTX ISA's text."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from . import machine  # noqa: F401  registers instructions
from .decode import _BUILDERS
from .snippets import call

NAN, INFINITY = float("nan"), float("inf")


def f(x) -> int:
    """Bits of ``x`` in FP32."""
    return int(np.float32(x).view("u4"))


TINY = 2.0**-140  # a subnormal number

# Instruction on a, b, c, e to d; then rows of inputs, each ending in the expected bits of d.
VECTORS = [
    ("add.s32 d, a, b;", (5, -7, -2), (0x7FFFFFFF, 1, 0x80000000)),
    ("sub.s32 d, a, b;", (5, 7, -2), (0, 0x80000000, 0x80000000)),
    ("mul.lo.s32 d, a, b;", (-3, 5, -15), (0x10000, 0x10000, 0)),
    ("mul.hi.s32 d, a, b;", (-1, 1, -1), (0x40000000, 4, 1)),
    ("mul.hi.u32 d, a, b;", (0xFFFFFFFF, 2, 1)),
    (
        "mov.b64 da, {b, a}; mul.hi.u64 da, da, da; mov.b64 {c, d}, da;",
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0x10000, 0, 1),
    ),
    ("mov.b64 da, {b, a}; mul.hi.u64 da, da, 0x500000001; mov.b64 {d, c}, da;", (7, 1 << 31, 37)),
    ("mad.lo.s32 d, a, b, c;", (3, 4, 5, 17), (0x10000, 0x10000, 1, 1)),
    ("mul.wide.s32 da, a, b; mov.b64 {d, x0}, da;", (-1, 3, -3), (0x10000, 0x10000, 0)),
    ("mul.wide.s32 da, a, b; mov.b64 {x0, d}, da;", (-1, 3, -1), (0x10000, 0x10000, 1)),
    ("mul.wide.u32 da, a, b; mov.b64 {x0, d}, da;", (-1, 3, 2)),
    (
        "mov.b64 da, {c, 0}; mad.wide.u32 da, a, b, da; mov.b64 {x0, d}, da;",
        (0x10000, 0x10000, 7, 1),
        (0x80000000, 2, 0xFFFFFFFF, 1),
    ),
    ("div.s32 d, a, b;", (-7, 2, -3), (7, -2, -3), (7, 2, 3), (-8, -2, 4)),
    ("rem.s32 d, a, b;", (-7, 2, -1), (7, -2, 1), (-8, 2, 0)),
    ("div.u32 d, a, b;", (-7, 2, 0x7FFFFFFC)),
    ("rem.u32 d, a, b;", (-7, 4, 1)),
    ("and.b32 d, a, b;", (0b1100, 0b1010, 0b1000)),
    ("or.b32 d, a, b;", (0b1100, 0b1010, 0b1110)),
    ("xor.b32 d, a, b;", (0b1100, 0b1010, 0b0110)),
    ("not.b32 d, a;", (0, -1)),
    ("neg.s32 d, a;", (5, -5), (0x80000000, 0x80000000)),
    ("abs.s32 d, a;", (-5, 5)),
    ("min.s32 d, a, b;", (-1, 1, -1)),
    ("max.s32 d, a, b;", (-1, 1, 1)),
    ("min.u32 d, a, b;", (-1, 1, 1)),
    ("max.relu.s32 d, a, b;", (-3, -2, 0), (-3, 2, 2)),
    ("shl.b32 d, a, b;", (1, 31, 0x80000000), (1, 32, 0), (1, 300, 0)),
    ("shr.u32 d, a, b;", (-1, 28, 15), (-1, 32, 0)),
    ("shr.s32 d, a, b;", (-8, 1, -4), (-8, 40, -1), (8, 40, 0)),
    ("prmt.b32 d, a, b, c;", (0x33221100, 0x77665544, 0x7250, 0x77225500)),
    ("prmt.b32 d, a, b, c;", (0x00008000, 0, 0x0998, 0x00FFFF00)),  # 8: the sign of a byte
    ("dp4a.u32.u32 d, a, b, c;", (0xFF020304, 0x01010101, 10, 274)),
    ("dp4a.s32.s32 d, a, b, c;", (0xFF020304, 0x02010101, 10, 17)),
    ("popc.b32 d, a;", (0xF0F00001, 9), (0, 0)),
    ("bfi.b32 d, a, b, 4, 8;", (0xFFF, 0, 0xFF0), (0, -1, 0xFFFFF00F)),
    ("bfi.b32 d, a, b, 30, 8;", (0b11, 0, 0xC0000000)),
    ("copysign.f32 d, a, b;", (-1.0, 3.0, f(-3)), (0.0, -3.0, f(3))),
    # 1 + 2^-23 squared is 1 + 2^-22 + 2^-46; the last term decides the tie that c makes.
    ("fma.rn.f32 d, a, b, c;", (2.0, 3.0, 1.0, f(7)), (1 + 2**-23, 1 + 2**-23, 1.0, f(2 + 2**-22))),
    ("fma.rn.f32 d, a, b, c;", (2.0**-40, 2.0**-40, 1 + 2**-23, f(1 + 2**-23))),
    # A tie at FP32, broken by what FP64 no longer holds.
    ("fma.rn.f32 d, a, b, c;", (2.0**-50, 2.0**-50, 1 + 2**-23, f(1 + 2**-23))),
    (
        "fma.rn.f32 d, a, b, c;",
        (1 + 2**-12, 2.0**-24 * (1 - 2**-12), 1.0, f(1)),
        (1.0, 2.0**-24, 1.0, f(1)),
        (1 + 2**-23, 2.0**-24, 1.0, f(1 + 2**-23)),
    ),
    ("add.f32 d, a, b;", (1.0, 2.0**-24, f(1)), (TINY, TINY, f(2 * TINY))),
    ("sub.f32 d, a, b;", (1.0, 3.0, f(-2))),
    ("mul.f32 d, a, b;", (3.0, -0.5, f(-1.5))),
    ("div.rn.f32 d, a, b;", (1.0, 3.0, 0x3EAAAAAB), (1.0, 0.0, f(INFINITY))),
    ("rcp.rn.f32 d, a;", (3.0, 0x3EAAAAAB)),
    ("sqrt.rn.f32 d, a;", (2.0, 0x3FB504F3)),
    ("min.f32 d, a, b;", (NAN, 2.0, f(2)), (0.0, -0.0, f(-0.0)), (-0.0, 0.0, f(-0.0))),
    ("max.f32 d, a, b;", (NAN, 2.0, f(2)), (0.0, -0.0, 0), (-0.0, 0.0, 0), (-0.0, -1.0, f(-0.0))),
    (
        "max.NaN.f32 d, a, b; setp.nan.f32 p, d, d; selp.u32 d, 1, 0, p;",
        (NAN, 2.0, 1),
        (2.0, 3.0, 0),
    ),
    ("min.NaN.f32 d, a, b;", (3.0, 2.0, f(2))),
    ("neg.f32 d, a;", (0.0, f(-0.0))),
    ("abs.f32 d, a;", (-2.0, f(2))),
    ("ex2.approx.ftz.f32 d, a;", (3.0, f(8)), (-130.0, 0), (-INFINITY, 0), (TINY, f(1))),
    ("rcp.approx.ftz.f32 d, a;", (4.0, f(0.25)), (0.0, f(INFINITY)), (INFINITY, 0)),
    ("lg2.approx.ftz.f32 d, a;", (8.0, f(3)), (TINY, f(-INFINITY)), (0.0, f(-INFINITY))),
    # Halves 1 and 2 with 0.5 and -2; the sum of 2048 and 1 is a tie in FP16.
    ("add.rn.f16x2 d, a, b;", (0x3C004000, 0x3800C000, 0x3E000000), (0x6800, 0x3C00, 0x6800)),
    ("mul.rn.f16x2 d, a, b;", (0x3C004000, 0x3800C000, 0x3800C400)),
    # Then (1 + 2^-10)^2 - (1 + 2^-9), which is zero if rounded twice, and 3 * 2^-24 doubled.
    ("fma.rn.f16x2 d, a, b, c;", (0x3C004000, 0x40003800, 0xC0003C00, 0x00004000)),
    ("fma.rn.f16x2 d, a, b, c;", (0x3C010003, 0x3C014000, 0xBC020000, 0x00100006)),
    # 1 and -3 less 0.5 and 2^-7, the latter a tie; then 1 + 2^-7 squared and -3 halved.
    ("sub.rn.bf16x2 d, a, b;", (0x3F80C040, 0x3F003C00, 0x3F00C040)),
    ("sub.rn.bf16x2 d, a, b;", (0x43800000, 0x0000BF80, 0x43803F80)),
    ("add.rn.bf16x2 d, a, b;", (0x3F80C040, 0x3F003C00, 0x3FC0C040)),
    ("mul.rn.bf16x2 d, a, b;", (0x3F81C040, 0x3F813F00, 0x3F82BFC0)),
    ("max.NaN.f16x2 d, a, b;", (0x3C004000, 0x3800C000, 0x3C004000)),
    ("min.NaN.bf16x2 d, a, b;", (0x3F80C000, 0x40000000, 0x3F80C000)),
    ("setp.lt.s32 p, a, b; selp.u32 d, 1, 2, p;", (-1, 0, 1), (0, 0, 2)),
    ("setp.lt.u32 p, a, b; selp.u32 d, 1, 2, p;", (-1, 0, 2)),
    ("setp.ge.s32 p|q, a, b; selp.u32 d, 1, 2, q;", (1, 0, 2)),
    ("setp.eq.s32 q, a, a; setp.ne.and.s32 p, a, b, q; selp.u32 d, 1, 2, p;", (1, 0, 1), (0, 0, 2)),
    ("setp.ne.f32 p, a, b; selp.u32 d, 1, 2, p;", (NAN, 0.0, 2), (1.0, 0.0, 1)),
    ("setp.neu.f32 p, a, b; selp.u32 d, 1, 2, p;", (NAN, 0.0, 1), (0.0, -0.0, 2)),
    ("setp.leu.f32 p, a, b; selp.u32 d, 1, 2, p;", (NAN, 0.0, 1), (1.0, 0.0, 2), (0.0, 0.0, 1)),
    ("setp.le.f32 p, a, b; selp.u32 d, 1, 2, p;", (NAN, 0.0, 2), (0.0, 0.0, 1)),
    ("setp.num.f32 p, a, b; selp.u32 d, 1, 2, p;", (NAN, 0.0, 2), (0.0, 0.0, 1)),
    ("setp.equ.f32 p, a, b; selp.u32 d, 1, 2, p;", (NAN, 0.0, 1), (1.0, 0.0, 2)),
    (
        "setp.ne.s32 p, a, 0; setp.ne.s32 q, b, 0; xor.pred p, p, q; not.pred p, p;"
        "selp.u32 d, 1, 0, p;",
        (1, 1, 1),
        (1, 0, 0),
    ),
    ("setp.ne.s32 p, a, 0; and.pred p, p, !p; selp.u32 d, 1, 0, p;", (1, 0), (0, 0)),
    ("mov.b32 {ha, hb}, a; mov.b32 d, {hb, ha};", (0x11112222, 0x22221111)),
    ("mov.f32 d, 0f3FC00000;", (0, f(1.5))),
    ("cvta.to.global.u64 da, in; sub.s64 da, da, in; mov.b64 {d, _}, da;", (0, 0)),
    ("cvt.u16.u32 ha, a; cvt.s32.s16 d, ha;", (0x18000, 0xFFFF8000), (0x7FFF, 0x7FFF)),
    ("cvt.u16.u32 ha, a; cvt.u32.u16 d, ha;", (0x18000, 0x8000)),
    ("cvt.s64.s32 da, a; mov.b64 {_, d}, da;", (-5, -1)),
    ("cvt.rn.f32.s32 d, a;", (-3, f(-3)), (16777217, f(16777216)), (16777219, f(16777220))),
    ("cvt.rn.f32.u32 d, a;", (-1, f(2.0**32))),
    ("cvt.rni.f32.f32 d, a;", (2.5, f(2)), (3.5, f(4)), (-0.5, f(-0.0))),
    ("cvt.rzi.s32.f32 d, a;", (-2.7, -2), (1e20, 0x7FFFFFFF), (NAN, 0)),
    ("cvt.rni.u32.f32 d, a;", (-2.7, 0), (2.5, 2)),
    ("mov.b32 {ha, hb}, a; cvt.f32.f16 d, ha;", (0x3C00, f(1)), (0x0001, f(2.0**-24))),
    # 65519.99 rounds to the largest FP16, 65520 to infinity.
    ("cvt.rn.f16x2.f32 d, a, b;", (1.0, 65519.0, 0x3C007BFF), (NAN, 65520.0, 0x7FFF7C00)),
    ("cvt.rn.f16.f32 ha, a; mov.b32 d, {ha, ha};", (-2.0, 0xC000C000)),
    ("cvt.rn.bf16x2.f32 d, a, b;", (1.0, 1 + 2**-8, 0x3F803F80), (NAN, 1 + 3 * 2**-8, 0x7FFF3F82)),
    ("cvt.pack.sat.u8.s32.b32 d, a, b, c;", (300, -5, 0x11112222, 0x2222FF00)),
    # 17 is a tie between 16 and 18, 1000 above the largest number.
    (
        "cvt.rn.satfinite.e4m3x2.f32 ha, a, b; cvt.u32.u16 d, ha;",
        (1.0, 17.0, 0x3858),
        (-1000.0, 2.0**-10, 0xFE00),
        (NAN, 3 * 2.0**-10, 0x7F02),
    ),
    ("mov.b32 {ha, hb}, a; cvt.rn.f16x2.e4m3x2 d, ha;", (0x387E, 0x3C005F00), (0x8001, 0x80001800)),
    (
        "{.reg .b8 u, v, s, t; mov.b32 {u, v, s, t}, a; cvt.rn.f16x2.e2m1x2 d, u;}",
        (0x27, 0x3C004600),
        (0x19, 0x3800B800),
    ),
    # Ties: 0.25 to 0, 0.75 to 1, 1.25 to 1, 1.75 to 2, 2.5 to 2, 3.5 and 5 to 4.
    (
        "{.reg .b8 u, v, s, t; cvt.rn.satfinite.e2m1x2.f32 u, a, b;"
        "cvt.rn.satfinite.e2m1x2.f32 v, c, e; mov.b32 d, {u, v, u, v};}",
        (0.25, 0.75, 1.25, 1.75, 0x24022402),
        (2.5, 3.5, 5.0, 100.0, 0x67466746),
        (-0.25, -6.0, NAN, -1.5, 0x7B8F7B8F),
    ),
]


def random_column(body, floating):
    """32 numbers of any size, none of them 0 or NaN."""
    generator = np.random.default_rng(len(body))
    if floating:
        return generator.normal(size=32) * 2.0 ** generator.integers(-9, 9, 32)
    numbers = generator.integers(1, 1 << 32, 32)
    numbers[::2] = generator.integers(1, 40, 16)
    halves = ".f16x2 d, a" in body or ".bf16x2 d, a" in body
    return numbers & 0xEFFFEFFF if halves else numbers  # no exponent of a half is all ones


@pytest.mark.parametrize(
    ("body", "rows"), [(x[0], x[1:]) for x in VECTORS], ids=lambda x: str(x)[:40]
)
def test_arithmetic(body, rows):
    """Lanes behind the rows get random inputs, for recorded.py."""
    floating = any(isinstance(x, float) for row in rows for x in row[:-1])
    columns = [np.array(x, "f4" if floating else "i8") for x in zip(*rows, strict=True)]
    inputs = {
        name: np.append(column, random_column(body + name, floating))[:32].astype(column.dtype)
        for name, column in zip("abce", columns[:-1], strict=False)
    }
    expected = [row[-1] & 0xFFFFFFFF for row in rows]
    assert call(body, inputs)[: len(rows), 0].tolist() == expected


LANE = np.arange(32)


@pytest.mark.parametrize(
    ("body", "source", "valid"),
    [
        ("shfl.sync.bfly.b32 d|p, a, 5, 31, -1;", LANE ^ 5, LANE >= 0),
        ("shfl.sync.idx.b32 d|p, a, 7, 31, -1;", LANE * 0 + 7, LANE >= 0),
        ("shfl.sync.up.b32 d|p, a, 3, 0, -1;", np.where(LANE < 3, LANE, LANE - 3), LANE >= 3),
        ("shfl.sync.down.b32 d|p, a, 3, 31, -1;", np.where(LANE > 28, LANE, LANE + 3), LANE <= 28),
        # 0x181f: segments of eight lanes
        ("shfl.sync.idx.b32 d|p, a, 1, 0x181f, -1;", LANE // 8 * 8 + 1, LANE >= 0),
        (
            "shfl.sync.down.b32 d|p, a, 1, 0x181f, -1;",
            np.where(LANE % 8 == 7, LANE, LANE + 1),
            LANE % 8 != 7,
        ),
    ],
)
def test_shuffles(body, source, valid):
    out = call(body + "selp.u32 e, 1, 0, p;", {"a": 100 + LANE}, ("d", "e"))
    assert (out[:, 0] == 100 + source).all()
    assert (out[:, 1] == valid).all()


def test_a_matrix_is_transposed():
    elements = 100 + np.arange(64).reshape(8, 8)
    words = elements.astype("u2").reshape(-1).view("u4")
    out = call("movmatrix.sync.aligned.m8n8.trans.b16 d, a;", {"a": words})
    assert (out[:, 0] == np.ascontiguousarray(elements.T.astype("u2")).reshape(-1).view("u4")).all()


def test_votes():
    body = (
        "setp.ne.s32 p, a, 0; vote.sync.ballot.b32 d, p, -1; vote.sync.any.pred q, p, -1;"
        "vote.sync.all.pred r, p, -1; selp.u32 e, 1, 0, q; selp.u32 f, 1, 0, r; bar.warp.sync -1;"
    )
    out = call(body, {"a": LANE % 3 == 0}, ("d", "e", "f"))
    assert (out == [sum(1 << i for i in range(0, 32, 3)), 1, 0]).all()
    assert (call(body, {"a": 0}, ("d", "e", "f")) == [0, 0, 0]).all()
    assert (call(body, {"a": 1}, ("d", "e", "f")) == [0xFFFFFFFF, 1, 1]).all()


def test_branches_part_a_warp_and_join_it_again():
    """A loop of as many rounds as the lane has units, in which odd lanes do something else."""
    body = """
      mov.u32 d, 0;
      mov.u32 b, 0;
    again:
      setp.ge.s32 p, b, a;
      @p bra done;
      and.b32 c, tid, 1;
      setp.eq.s32 q, c, 0;
      @q bra even;
      add.s32 d, d, 100;
      bra.uni next;
    even:
      add.s32 d, d, 1;
    next:
      add.s32 b, b, 1;
      bra again;
    done:
      shfl.sync.bfly.b32 e, d, 1, 31, -1;
    """
    rounds = LANE % 5
    expected = rounds * np.where(LANE % 2, 100, 1)
    for seed in range(4):
        out = call(body, {"a": rounds}, ("d", "e"), seed=seed)
        assert (out[:, 0] == expected).all()
        assert (out[:, 1] == expected[LANE ^ 1]).all()


def test_a_guarded_instruction_and_threads_that_leave():
    body = """
      mov.u32 d, 1; st.global.b32 [out], d; setp.lt.s32 p, tid, 5; @p mov.u32 d, 2;
      setp.gt.s32 q, tid, 20; @q ret;
    """
    assert (call(body)[:, 0] == np.select([LANE < 5, LANE > 20], [2, 1], 1)).all()


def test_accesses_of_every_width():
    body = """
      shl.b32 b, tid, 4;
      mov.u32 c, dynamic;
      add.s32 b, b, c;
      st.shared.v4.b32 [b], {a, 11, 12, 13};
      ld.shared.v2.u32 {d, e}, [b+8];
      ld.shared.u8 f, [b];
      ld.global.nc.u16 ha, [in];
      cvt.u32.u16 x0, ha;
      ld.b8 x1, [in];
      ld.global.s8 x2, [in];
    """
    names = ("d", "e", "f", "x0", "x1", "x2")
    out = call(body, {"a": 0x1FF80 + LANE}, names, shared_bytes=512)
    low = (0x80 + LANE) & 0xFF
    assert (out[:, :2] == [12, 13]).all()
    assert (out[:, 2] == low).all()
    assert (out[:, 3] == 0xFF80 + LANE).all()
    assert (out[:, 4] == low).all()
    assert (out[:, 5].view("i4") == low - 256).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed):
    """Matrix i's row r is bytes 128 i + 16 r; element c of it is 100 i + 8 r + c."""
    elements = np.arange(4)[:, None, None] * 100 + np.arange(64).reshape(8, 8)
    words = elements.astype("u2").reshape(-1).view("u4").reshape(32, 4)
    body = f"""
      shl.b32 b, tid, 4;
      mov.u32 c, dynamic;
      add.s32 b, b, c;
      st.shared.v4.b32 [b], {{x0, x1, x2, x3}};
      bar.warp.sync -1;
      ldmatrix.sync.aligned.m8n8.x4{".trans" * transposed}.shared.b16 {{y0, y1, y2, y3}}, [b];
    """
    inputs = {f"x{i}": words[:, i] for i in range(4)}
    out = call(body, inputs, ("y0", "y1", "y2", "y3"), shared_bytes=512)
    for lane in range(32):
        for matrix in range(4):
            row, column = lane // 4, lane % 4 * 2
            x = elements[matrix].T if transposed else elements[matrix]
            assert out[lane, matrix] == x[row, column] | x[row, column + 1] << 16


# ----------------------------------------------------------------------------- products of matrices
def fragments(matrix, bits, place):
    """Words [32, registers] of codes; ``place(lane, i)`` is where in ``matrix`` element i is."""
    count = matrix.size // 32
    codes = np.array([[int(matrix[place(lane, i)]) for i in range(count)] for lane in range(32)])
    per_word = 32 // bits
    codes = (codes & ((1 << bits) - 1)).reshape(32, -1, per_word)
    return (codes << (bits * np.arange(per_word))).sum(-1)


def place_a(bits):
    """Rows groupID and groupID + 8 by turns in a lane's words, then the second half of k."""

    def place(lane, i):
        word, inner = divmod(i, 32 // bits)
        k = lane % 4 * (32 // bits) + inner + 128 // bits * (word // 2)
        return (lane >> 2) + 8 * (word % 2), k

    return place


def place_b(bits):
    def place(lane, i):
        word, inner = divmod(i, 32 // bits)
        return lane % 4 * (32 // bits) + inner + 128 // bits * word, lane >> 2

    return place


def place_d(lane, i):
    return (lane >> 2) + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


def multiply(opcode, left, right, bits, more="", **inputs):
    """D [16, 8] as words, with C[i][j] = 8 i + j in its type."""
    c = np.arange(128).reshape(16, 8)
    if opcode.endswith("f32") or "ue4m3" in opcode:
        c = c.astype("f4").view("u4")
    words = {"x": fragments(left, bits, place_a(bits)), "y": fragments(right, bits, place_b(bits))}
    words["z"] = fragments(c, 32, place_d)
    given = {f"{name}{i}": x[:, i] for name, x in words.items() for i in range(x.shape[1])}
    body = f"{opcode} {{w0, w1, w2, w3}}, {{x0, x1, x2, x3}}, {{y0, y1}}, {{z0, z1, z2, z3}}{more};"
    out = call(body, {**given, **inputs}, ("w0", "w1", "w2", "w3"))
    d = np.zeros((16, 8), "u4")
    for lane in range(32):
        for i in range(4):
            d[place_d(lane, i)] = out[lane, i]
    return d


C = np.arange(128).reshape(16, 8)


@pytest.mark.parametrize("kind", ["s8", "u8"])
def test_products_of_bytes(kind):
    generator = np.random.default_rng(0)
    low, high = (0, 256) if kind == "u8" else (-128, 128)
    a, b = generator.integers(low, high, (16, 32)), generator.integers(-128, 128, (32, 8))
    opcode = f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s8.s32"
    d = multiply(opcode, a, b, 8)
    assert (d.view("i4") == a @ b + C).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_products_of_halves(kind):
    generator = np.random.default_rng(0)
    a, b = generator.integers(-8, 9, (16, 16)) / 4, generator.integers(-8, 9, (16, 8)) / 4
    codes = [
        x.astype("f2").view("u2") if kind == "f16" else x.astype("f4").view("u4") >> 16
        for x in (a, b)
    ]
    opcode = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    d = multiply(opcode, *codes, 16)
    assert (d.view("f4") == (a @ b + C).astype("f4")).all()


def e4m3(code):
    """Value of an E4M3 code below 0x7f: four bits of exponent with bias 7, three of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(code & 128, -size, size)


def e2m1(code):
    return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7] * np.where(code & 8, -1, 1)


E4M3 = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"


def test_products_of_e4m3():
    generator = np.random.default_rng(0)
    a, b = generator.integers(-8, 9, (16, 32)) / 4, generator.integers(-8, 9, (32, 8)) / 4
    codes = (x.astype(ml_dtypes.float8_e4m3fn).view("u1") for x in (a, b))
    assert (multiply(E4M3, *codes, 8).view("f4") == a @ b + C).all()


def test_sums_of_products_are_rounded_once(interpreted):
    generator = np.random.default_rng(0)
    a, b = generator.integers(0x20, 0x50, (16, 32)), generator.integers(0xA0, 0xD0, (32, 8))
    right = e4m3(a) @ e4m3(b) + C
    assert np.allclose(multiply(E4M3, a, b, 8).view("f4"), right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pair", [0, 1])
@pytest.mark.parametrize("lane", [0, 1, 2, 3])
def test_block_scaled_products_with_every_selector(pair, lane):
    """Each lane brings its own scales; only those that the selectors name may count."""
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 16, (16, 64)), generator.integers(0, 16, (64, 8))
    sfa, sfb = generator.integers(0x28, 0x48, (2, 32, 4))
    word = (1 << 8 * np.arange(4, dtype="i8")).astype("i8")
    opcode = (
        "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col"
        ".f32.e2m1.e2m1.f32.ue4m3"
    )
    more = f", {{a}}, {{0, {pair}}}, {{b}}, {{0, {lane}}}"
    d = multiply(opcode, a, b, 4, more, a=(sfa * word).sum(1), b=(sfb * word).sum(1))
    right = C.astype("f8")
    for i in range(16):
        for j in range(8):
            # Row g's scales are in the pair's first lane of group g, row g + 8's in its second one.
            scales_a = e4m3(sfa[4 * (i % 8) + 2 * pair + (i >= 8)])
            scales_b = e4m3(sfb[4 * j + lane])
            for block in range(4):
                k = slice(16 * block, 16 * block + 16)
                dot = (e2m1(a[i, k]) * e2m1(b[k, j])).sum()
                right[i, j] += dot * scales_a[block] * scales_b[block]
    assert np.allclose(d.view("f4"), right, rtol=1e-6, atol=1e-4)


# ------------------------------------------------------------------------------ barriers and copies
@pytest.mark.parametrize("seed", range(6))
def test_barriers_of_a_block(seed):
    """Each warp reads what the other one wrote, and counts over all threads."""
    body = """
      mov.u32 b, dynamic;
      shl.b32 c, tid, 2;
      add.s32 b, b, c;
      st.shared.b32 [b], tid;
      bar.sync 0;
      xor.b32 c, c, 128;
      mov.u32 b, dynamic;
      add.s32 b, b, c;
      ld.shared.b32 d, [b];
      setp.lt.u32 p, tid, 40;
      bar.red.popc.u32 e, 1, p;
      bar.red.and.pred q, 0, p;
      selp.u32 f, 1, 0, q;
      setp.lt.u32 p, tid, 32;
      @p bra first;
      barrier.sync 3, 64;
      bra after;
    first:
      bar.arrive 3, 64;
    after:
      bar.red.or.pred q, 0, p;
      selp.u32 x0, 1, 0, q;
      fence.proxy.async.shared::cta;
    """
    out = call(body, (), ("d", "e", "f", "x0"), threads=64, shared_bytes=256, seed=seed)
    assert (out[:, 0] == np.arange(64) ^ 32).all()
    assert (out[:, 1:] == [40, 0, 1]).all()


def test_counts_of_registers_mean_nothing_here(interpreted):
    """A GPU wants them from a whole warpgroup of a kernel that says how many it begins with."""
    assert (call("mov.u32 d, 7; setmaxnreg.dec.sync.aligned.u32 40;") == 7).all()


@pytest.mark.parametrize("seed", range(6))
def test_copies_by_threads_in_groups(seed):
    body = """
      shl.b32 b, tid, 5;
      mov.u32 c, dynamic;
      add.s32 b, b, c;
      cp.async.cg.shared.global [b], [in], 16;
      cp.async.commit_group;
      add.s32 c, b, 16;
      cp.async.ca.shared.global [c], [in], 8;
      cp.async.commit_group;
      cp.async.wait_group 1;
      ld.shared.v2.b32 {d, e}, [b];
      cp.async.wait_all;
      ld.shared.b32 f, [b+20];
    """
    inputs = {"a": LANE, "x0": LANE + 100, "x1": 0, "x2": 0}
    out = call(body, inputs, ("d", "e", "f"), shared_bytes=1024, seed=seed)
    assert (out == np.stack([LANE, LANE + 100, LANE + 100], 1)).all()


MBARRIER = """
  mov.u32 b, dynamic;
  mov.u32 f, 0;
  setp.ne.s32 p, tid, 0;
  @p bra ready;
  mbarrier.init.shared.b64 [b], 1;
  fence.mbarrier_init.release.cluster;
ready:
  bar.sync 0;
  @p bra wait;
  mbarrier.arrive.expect_tx.shared.b64 _, [b], 32;
  add.s32 c, b, 64;
  cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [c], [in], 16, [b];
  add.s32 c, b, 80;
  cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [c], [in], 16, [b];
wait:
  mbarrier.try_wait.parity.shared.b64 q, [b], 0;
  @!q bra wait;
  ld.shared.b32 d, [b+84];
  mbarrier.test_wait.parity.shared.b64 q, [b], 1;
  selp.u32 e, 1, 0, q;
"""


@pytest.mark.parametrize("seed", range(6))
def test_bulk_copies_end_a_phase_of_an_mbarrier(seed):
    """The barrier's first phase, of parity 0, ends when 32 bytes have come."""
    inputs = {"a": 5, "x0": 6, "x1": 7, "x2": 8}
    out = call(MBARRIER, inputs, ("d", "e"), threads=128, shared_bytes=128, seed=seed)
    assert (out == [6, 0]).all()


def test_an_mbarrier_behind_copies_of_threads():
    body = """
      mov.u32 b, dynamic;
      setp.ne.s32 p, tid, 0;
      @p bra ready;
      mbarrier.init.shared.b64 [b], 64;
    ready:
      bar.sync 0;
      shl.b32 c, tid, 4;
      add.s32 c, c, b;
      cp.async.cg.shared.global [c+128], [in], 16;
      cp.async.mbarrier.arrive.noinc.shared.b64 [b];
      mbarrier.arrive.shared.b64 da, [b];
    wait:
      mbarrier.test_wait.parity.shared.b64 q, [b], 0;
      @!q bra wait;
      xor.b32 c, c, 16;
      ld.shared.b32 d, [c+128];
    """
    inputs = {"a": np.arange(32), "x0": 6, "x1": 7, "x2": 8}
    out = call(body, inputs, shared_bytes=1024)
    assert (out[:, 0] == LANE ^ 1).all()


def test_every_instruction_has_a_vector():
    """Of each registered pattern some opcode stands in these files."""
    names = ("test_instructions.py", "test_wgmma.py", "snippets.py")
    text = "".join(Path(__file__).with_name(name).read_text("utf-8") for name in names)
    text = (
        text.replace('"\n        "', "")
        .replace("{kind}", "s8")
        .replace('{".trans" * transposed}', "")
    )
    # {kind} in tests of products
    text += "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    text += "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"
    assert [pattern.pattern for pattern, _ in _BUILDERS if not pattern.search(text)] == []
