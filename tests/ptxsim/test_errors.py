"""What PTX leaves undefined is an error that says where."""

import numpy as np
import pytest
import torch

from .machine import Code
from .ptx import KernelError, parse
from .snippets import call
from .test_instructions import MBARRIER

SHARED = "mov.u32 b, dynamic; shl.b32 c, tid, 2; add.s32 c, c, b;"
COPY = "shl.b32 c, tid, 4; add.s32 c, c, b; cp.async.cg.shared.global [c], [in], 16;"
INPUTS = {"a": 0, "x0": 0, "x1": 0, "x2": 0}

ERRORS = [
    ("frobnicate.s32 d, a, b;", "unknown instruction frobnicate"),
    ("add.sat.s32 d, a, b;", "unknown instruction add.sat"),
    ("mov.u32 d, %clock;", "unknown register %clock"),
    ("mov.u32 d, nowhere;", "nowhere"),
    ("bra nowhere;", "no label nowhere"),
    ("add.s32 d, a;", "1 operands|2 operands"),
    ("div.s32 d, a, a;", "division by zero"),
    # global memory
    ("ld.global.b32 d, [in+2];", "not aligned to 4 bytes"),
    ("ld.global.v4.b32 {d, e, f, x0}, [in+8];", "not aligned to 16 bytes"),
    ("ld.global.b32 d, [in+8192];", "in no tensor"),
    ("ld.global.b32 d, [in+-16];", "in no tensor"),
    ("st.global.b32 [out+4], tid;", "in no tensor"),  # the last thread's is outside
    ("mov.b64 da, 0; ld.global.b32 d, [da];", "in no tensor"),
    # shared memory
    (SHARED + "ld.shared.b32 d, [c];", "nothing was written to"),
    (SHARED + "st.shared.b32 [c+1024], a;", "outside of 1024 bytes"),
    (SHARED + "st.shared.b32 [c+-4], a;", "outside of 1024 bytes"),
    (SHARED + "st.shared.b32 [c+1], a;", "not aligned"),
    (SHARED + "st.shared.b8 [c], a; ld.shared.b32 d, [c];", "nothing was written to"),
    # copies
    (SHARED + COPY + "ld.shared.b32 d, [c];", "copy under way"),
    (SHARED + COPY + "cp.async.wait_group 0; ld.shared.b32 d, [c];", "copy under way"),
    (SHARED + COPY + "st.shared.b32 [c], a;", "copy under way"),
    (SHARED + COPY + COPY, "copy under way"),
    (SHARED + "cp.async.cg.shared.global [c], [in+4], 16;", "not aligned to 16 bytes"),
    (MBARRIER.replace("[c], [in], 16", "[c], [in], 8"), "8 bytes from"),
    (MBARRIER.replace("_, [b], 32", "_, [b], 48"), "wait for each other.*snippet.cu:7"),
    (MBARRIER.replace("_, [b], 32", "_, [b], 16"), "snippet.cu:7"),
    (MBARRIER.replace("@!q bra wait;", ""), "copy under way|race"),
    # barriers
    ("setp.lt.u32 p, tid, 3; @p bra here; bar.sync 0; here:", "only part of warp"),
    ("setp.lt.u32 p, tid, 32; @p bra here; bar.sync 0; bar.sync 0; here: bar.sync 0;", "wait for"),
    ("setp.lt.u32 p, tid, 32; @p bra here; bar.sync 1, 64; here:", "wait for"),
    ("bar.sync 17;", "barrier 17"),
    ("bar.sync 0, 33;", "for 33 threads"),
    ("setp.lt.u32 p, tid, 32; @p bra a1; bar.sync 1, 96; a1: bar.sync 1, 64;", "in two ways"),
    ("mov.u32 b, dynamic; mbarrier.arrive.shared.b64 da, [b];", "no mbarrier"),
    ("mov.u32 b, dynamic; mbarrier.init.shared.b64 [b], 1;", "where one is"),
    ("mov.u32 b, dynamic; mbarrier.init.shared.b64 [b], 0;", "for 0 arrivals"),
    (
        MBARRIER.replace("[b], 32;", "[b], 32; mbarrier.arrive.shared.b64 da, [b];"),
        "arrivals",
    ),
    (MBARRIER + "ld.shared.b32 d, [b];", "bytes of an mbarrier"),
    (MBARRIER + "setp.eq.s32 p, tid, 0; @p st.shared.b32 [b], d;", "bytes of an mbarrier"),
    # lanes of a warp
    ("setp.lt.u32 p, tid, 9; @p shfl.sync.idx.b32 d, a, 3, 31, -1;", "member mask is not there"),
    ("shfl.sync.idx.b32 d, a, 3, 31, 1;", "not in its member mask"),
    ("setp.lt.u32 p, tid, 9; @p bar.warp.sync -1;", "member mask is not there"),
    (
        "setp.lt.u32 p, tid, 9; @!p bra here; vote.sync.ballot.b32 d, p, 0x1ff;"
        "shfl.sync.idx.b32 d, a, 20, 31, 0x1ff; here:",
        "from one that is not there",
    ),
    (
        SHARED + "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {d}, [b];",
        "1 registers for 4 matrices",
    ),
    (
        SHARED + "setp.lt.u32 p, tid, 9;@p ldmatrix.sync.aligned.m8n8.x1.shared.b16 {d}, [b];",
        "only part of a warp",
    ),
    # races
    (SHARED + "st.shared.b32 [c], a; xor.b32 c, c, 128; ld.shared.b32 d, [c];", "race|nothing was"),
    (SHARED + "and.b32 c, c, 127; st.shared.b32 [c], a;", "race: .* written"),
    (
        SHARED + "st.shared.b32 [c], a; bar.sync 0; and.b32 c, c, 127; ld.shared.b32 d, [c];"
        "setp.lt.u32 p, tid, 32; @p st.shared.b32 [c], a;",
        "race: .* read",
    ),
]


@pytest.mark.parametrize(("body", "message"), ERRORS, ids=lambda x: str(x)[:50])
def test_an_error_says_what_and_where(body, message):
    with pytest.raises(KernelError, match=f"(?s){message}") as found:
        call(body, INPUTS, threads=64, shared_bytes=1024)
    assert "snippet.cu:7" in str(found.value) or "no label" in message


def test_an_error_names_the_line_of_the_ptx():
    with pytest.raises(
        KernelError, match=r"PTX line 2\d \(snippet\.cu:7\): ld\.global\.b32 d, \[in"
    ):
        call("ld.global.b32 d, [in+2];", INPUTS)


@pytest.mark.parametrize("seed", range(8))
def test_a_race_is_found_in_whatever_order_warps_run(seed):
    """A missing second barrier: the slot is written again while others may still read it."""
    body = (
        SHARED
        + """
      mov.u32 f, 0;
    again:
      setp.eq.s32 p, tid, 0;
      @p st.shared.b32 [b], f;
      bar.sync 0;
      ld.shared.b32 d, [b];
      add.s32 f, f, 1;
      setp.lt.s32 p, f, 3;
      @p bra again;
    """
    )
    with pytest.raises(KernelError, match="race"):
        call(body, INPUTS, threads=128, shared_bytes=512, seed=seed)
    fixed = body.replace("add.s32 f", "bar.sync 0; add.s32 f")
    assert (call(fixed, INPUTS, threads=128, shared_bytes=512, seed=seed) == 2).all()


def test_memory_behind_a_tensor_is_out_of_bounds_although_it_exists():
    buffer = torch.zeros(64, dtype=torch.int32)
    low, high = (int(x) for x in np.array([buffer.data_ptr()], "u8").view("u4"))
    body = "mov.b64 da, {a, b}; ld.global.b32 d, [da+252];"
    assert (call(body, {"a": low, "b": high}) == 0).all()
    with pytest.raises(KernelError, match="in no tensor"):
        call(body.replace("252", "256"), {"a": low, "b": high})
    del buffer
    with pytest.raises(KernelError, match="in no tensor"):
        call(body, {"a": low, "b": high})


def test_text_that_is_no_ptx_is_refused():
    with pytest.raises(KernelError, match="0 kernels"):
        parse(".version 8.0\n")
    with pytest.raises(KernelError, match="PTX line 2"):
        Code(parse(".entry x()\n{ .local .b32 y[4];\nret; }\n"))
