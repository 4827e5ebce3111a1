"""wgmma against products worked out by hand, matrices laid out as the PTX ISA draws them."""

import ml_dtypes
import numpy as np
import pytest

from .ptx import KernelError
from .snippets import call
from .test_instructions import fragments, place_a

THREADS = 128
A_AT, SHARED = 32768, 40960  # bytes; B comes first
NO_SWIZZLE, BY_128, BY_64, BY_32 = range(4)  # as descriptors number them
PITCH = {BY_128: 128, BY_64: 64, BY_32: 32}  # bytes of a row
# By type: NumPy's, the smallest and the largest whole number tried, and the type of D.
KINDS = {
    "f16": ("f2", -8, 8, "f32"),
    "bf16": (ml_dtypes.bfloat16, -8, 8, "f32"),
    "e4m3": (ml_dtypes.float8_e4m3fn, -8, 8, "f32"),
    "s8": ("i1", -128, 127, "s32"),
    "u8": ("u1", 0, 255, "s32"),
}
_SETUP = "mov.u32 c, dynamic; mad.lo.s32 d, tid, {bytes}, c;"
_STORE = "st.shared.v4.b32 [d+{at}], {{u{}, u{}, u{}, u{}}};"
_RUN = """
  fence.proxy.async.shared::cta;
  bar.sync 0;
  shr.u32 c, c, 4;
  cvt.u64.u32 wide, c;
  add.s64 da, wide, {a};
  add.s64 db, wide, {b};
  setp.ne.s32 p, {adds}, 0;
  wgmma.fence.sync.aligned;
  {opcode} {{{registers}}}, {first}, db, p{more};
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned {pending};
"""


def unit_at(row, unit, swizzle, leading, stride, along_rows):
    """Byte at which 16 bytes lie: section on the shared memory layout of matrices.

    along_rows: the rows lie along K, and what the offsets are between is known from that.
    """
    if swizzle == NO_SWIZZLE:
        across, down = (leading, stride) if along_rows else (stride, leading)
        return row // 8 * down + unit * across + row % 8 * 16
    pitch = PITCH[swizzle]
    panel, unit = divmod(unit, pitch // 16)
    mixed = unit ^ row % 8 * pitch // 128
    return panel * leading + row // 8 * stride + row % 8 * pitch + mixed * 16


def lay_out(memory, start, codes, swizzle, transposed):
    """Put ``codes`` [rows, k] there; answers the descriptor."""
    rows = np.ascontiguousarray(codes.T if transposed else codes)
    units = rows.view("u1").reshape(len(rows), -1, 16)
    if swizzle == NO_SWIZZLE:
        leading, stride = 128, 128 * units.shape[1]
        if transposed:
            leading, stride = stride, leading
    else:
        leading, stride = len(rows) * PITCH[swizzle], 8 * PITCH[swizzle]
    # Where a row along K has room for more than one product's part, this is the second one.
    first = 2 if not transposed and swizzle in (BY_128, BY_64) else 0
    for row, unit in np.ndindex(units.shape[:2]):
        at = start + unit_at(row, first + unit, swizzle, leading, stride, not transposed)
        memory[at : at + 16] = units[row, unit]
    return start // 16 + first | leading // 16 << 16 | stride // 16 << 32 | swizzle << 62


def multiply(
    kind="s8",
    b_kind=None,
    n=16,
    swizzle=BY_32,
    transposed=False,
    *,
    a_swizzle=None,
    a_transposed=False,
    signs=(1, 1),
    c=None,
    pending=0,
    n_said=None,
    **bits,
):
    """D [64, n], and what it ought to be; A lies in shared memory where it has a swizzle."""
    generator = np.random.default_rng(0)
    b_kind = b_kind or kind
    dtype, low, high, d_type = KINDS[kind]
    b_dtype, b_low, b_high, _ = KINDS[b_kind]
    a, b = np.dtype(dtype), np.dtype(b_dtype)
    k = 32 // a.itemsize
    a_codes = generator.integers(low, high + 1, (64, k)).astype(a)
    b_codes = generator.integers(b_low, b_high + 1, (n, k)).astype(b)
    memory = np.full(SHARED, 0x55, "u1")  # of which nothing but the matrices may count
    codes = f"u{a.itemsize}"
    code = lay_out(memory, 0, b_codes.view(codes), swizzle, transposed)
    words = [
        fragments(a_codes.view(codes)[16 * w :][:16], 256 // k, place_a(256 // k)) for w in range(4)
    ]
    inputs = {f"x{i}": x for i, x in enumerate(np.concatenate(words).T)}
    per_thread = SHARED // THREADS // 4
    image = memory if a_swizzle is None else memory.copy()
    a_code, first = 0, "{x0, x1, x2, x3}"
    if a_swizzle is not None:
        a_code, first = lay_out(image, A_AT, a_codes.view(codes), a_swizzle, a_transposed), "da"
    inputs |= {f"u{i}": x for i, x in enumerate(image.view("u4").reshape(THREADS, per_thread).T)}
    more = []
    if d_type == "f32":
        more += signs
    if k == 16:
        more += [int(a_transposed)] * (a_swizzle is not None) + [int(transposed)]
    names = [f"m{i}" for i in range(n // 2)]
    body = _SETUP.format(bytes=4 * per_thread)
    body += "".join(_STORE.format(*range(i, i + 4), at=4 * i) for i in range(0, per_thread, 4))
    body += "".join(f"mov.u32 {name}, {0 if c is None else hex(c)};" for name in names)
    body += _RUN.format(
        a=hex(a_code),
        b=hex(code | bits.get("set_bits", 0)),
        adds=int(c is not None),
        opcode=f"wgmma.mma_async.sync.aligned.m64n{n_said or n}k{k}.{d_type}.{kind}.{b_kind}",
        registers=", ".join(names),
        first=first,
        more="".join(f", {x}" for x in more),
        pending=pending,
    )
    out = call(body, inputs, names, threads=THREADS, shared_bytes=SHARED)
    d = np.zeros((64, n), "u4")
    for thread, i in np.ndindex(out.shape):
        warp, lane = divmod(thread, 32)
        row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
        d[row, i // 4 * 8 + lane % 4 * 2 + i % 2] = out[thread, i]
    right = np.prod(signs) * a_codes.astype("f8") @ b_codes.astype("f8").T
    return d.view("f4" if d_type == "f32" else "i4"), right


def check(*args, **options):
    d, right = multiply(*args, **options)
    assert (d == right).all()


SWIZZLES = {"no swizzle": NO_SWIZZLE, "128 bytes": BY_128, "64 bytes": BY_64, "32 bytes": BY_32}


@pytest.mark.parametrize("pair", ["s8 s8", "u8 s8", "s8 u8", "u8 u8", "e4m3", "f16", "bf16"])
def test_types(pair):
    check(*[*pair.split(), None][:2], swizzle=BY_128)


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("kind", ["u8", "f16"])
def test_rows_of_b_along_k(kind, swizzle):
    check(kind, swizzle=SWIZZLES[swizzle])


@pytest.mark.parametrize(("kind", "n"), [("s8", 8), ("s8", 24), ("s8", 128), ("f16", 40)])
def test_widths(kind, n):
    check(kind, n=n, swizzle=BY_128)


def test_the_widest(interpreted):
    """Not recorded: 64 KiB of results."""
    check("s8", n=256, swizzle=BY_128)
    check("bf16", n=256, swizzle=BY_128, transposed=True)


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_rows_of_b_along_n(swizzle):
    """B has two of the parts into which swizzling cuts its rows."""
    swizzle = SWIZZLES[swizzle]
    check("bf16", n=PITCH.get(swizzle, 16), swizzle=swizzle, transposed=True)


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize(("kind", "transposed"), [("u8", False), ("f16", False), ("f16", True)])
def test_a_in_shared_memory(kind, transposed, swizzle):
    check(kind, swizzle=BY_64, a_swizzle=SWIZZLES[swizzle], a_transposed=transposed)


@pytest.mark.parametrize("kind", ["f16", "e4m3"])
def test_signs(kind):
    check(kind, signs=(-1, 1))
    check(kind, signs=(-1, -1))


def test_adding():
    d, right = multiply("s8", c=1000)
    assert (d == right + 1000).all()
    d, right = multiply("f16", c=0x3F800000)
    assert (d == right + 1).all()


def test_what_no_wait_has_ended_is_noise(interpreted):
    d, right = multiply(pending=1)
    assert (d != right).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"set_bits": 1 << 49}, "sets bits that are unknown"),
        ({"n": 40}, "40 columns do not exist"),
        ({"n": 64, "n_said": 128}, "fragments of a wrong size"),
        ({"kind": "f16", "b_kind": "bf16"}, "have no product"),
        ({"signs": ()}, "not as many as"),
    ],
)
def test_what_the_document_does_not_have_is_refused(options, message, interpreted):
    with pytest.raises(KernelError, match=message):
        multiply(**{"kind": "e4m3" if "signs" in options else "s8", **options})
