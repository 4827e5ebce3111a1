"""Faults put into the kernels' sources: each is found, by what the kernel does or what it computes.

Small calls, but with more tiles than a pipeline has stages, ends inside of tiles, and masks. Wrong
numbers are wrong against exact attention or the kernel's model; everything else is an error of the
interpreter, whatever the numbers.
"""

import pytest
from sageattention3.kernels.launch import sm80_int8, sm120_fp4
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import exact_attention, fp4_model

from .calls import token_major
from .ptx import KernelError
from .simulator import Simulator

NUMBERS, RACE, UNDER_WAY, OUTSIDE, HANGS = (
    "numbers",
    "race",
    "under way",
    "in no tensor",
    "wait for",
)

# File, text, other text, and how it is found.
INT8_FAULTS = [
    # Missing barriers.
    (
        "sm80_int8_attention.cu",
        "__syncthreads();  // the tiles fetched",
        "// the tiles fetched",
        RACE,
    ),
    ("sm80_int8_attention.cu", "wait_for_copies<0>();\n        __syncthreads();", "", UNDER_WAY),
    (
        "sm80_int8_attention.cu",
        "wait_for_copies<0>();\n    __syncthreads();",
        "__syncthreads();",
        UNDER_WAY,
    ),
    (
        "token_sample.cuh",
        "__syncthreads();\n    float sum",
        "float sum",
        f"{RACE}|nothing was written",
    ),
    (
        "int8_values.cuh",
        "__syncthreads();\n  if (threadIdx.x < HEAD_DIM) {\n    float low",
        "if (threadIdx.x < HEAD_DIM) {\n    float low",
        f"{RACE}|nothing was written",
    ),
    # A barrier that part of the block never reaches.
    (
        "sm80_int8_attention.cu",
        "wait_for_copies<0>();\n        __syncthreads();",
        "wait_for_copies<0>(); if (threadIdx.x < 32) __syncthreads();",
        f"{RACE}|{HANGS}",
    ),
    # Ends of tensors.
    (
        "int8_queries_keys.cuh",
        "keys[r] < v.kv_len;",
        "keys[r] <= v.kv_len;",
        f"{NUMBERS}|{OUTSIDE}",
    ),
    ("int8_values.cuh", "keys[i] < p.kv_len && channel", "channel", OUTSIDE),
    (
        "int8_warp.cuh",
        "bool hidden = key + i > last_key;",
        "bool hidden = key + i > last_key + 1;",
        NUMBERS,
    ),
    (
        "sm80_int8_attention.cu",
        "if (w.row(r) < p.q_len && channel",
        "if (w.row(r) <= p.q_len && channel",
        f"{NUMBERS}|{OUTSIDE}",
    ),
    # Layouts: a wrong entry of a permutation, halves of panels, lanes of a load.
    ("int8_layout.cuh", "8 * j + 2 * t + e", "2 * j + 4 * t + e", NUMBERS),
    ("panels.cuh", "lane / 8 % 2 * 16", "(1 - lane / 8 % 2) * 16", NUMBERS),
    # Numbers.
    ("int8_warp.cuh", "as_float(total), weight[r]", "as_float(total), weight[0]", NUMBERS),
    (
        "int8_values.cuh",
        "rintf(middle * inverse) - MIDDLE_CODE",
        "rintf(middle * inverse)",
        NUMBERS,
    ),
    ("int8_probabilities.cuh", "0x6420", "0x4620", NUMBERS),
    ("ptx", ".s32.u8.u8.s32", ".s32.u8.s8.s32", NUMBERS),
    ("ptx", "dp4a.u32.u32", "dp4a.s32.s32", NUMBERS),
]

FP4_FAULTS = [
    # Selectors of scales.
    ("fp4_mma.cuh", "switch (n % 4)", "switch (n % 4 ^ 1)", NUMBERS),
    ("fp4_mma.cuh", '"n"(A_PAIR)', '"n"(1 - A_PAIR)', NUMBERS),
    ("fp4_warp.cuh", "0x7351 : 0x6240", "0x6240 : 0x7351", NUMBERS),
    ("fp4_warp.cuh", "0x7351 : 0x6240", "0x7531 : 0x6420", NUMBERS),
    # P divided by its scale before that was rounded.
    ("fp4_warp.cuh", "unpack_e4m3(scale, codes);", "", NUMBERS),
    # Layouts.
    ("fp4_layout.cuh", "8 * j + 2 * t + e", "8 * t + 2 * j + e", NUMBERS),
    ("fp4_scores.cuh", "(n * 4 + t) * 16", "(n * 4 + 3 - t) * 16", NUMBERS),
    (
        "panels.cuh",
        "row * 32 + (byte ^ ((row & 4) << 2))",
        "row * 32 + byte % 16",
        f"{NUMBERS}|{RACE}",
    ),
    # Ends of tensors.
    ("live_keys.cuh", "tokens[a] < end", "true", f"{NUMBERS}|{OUTSIDE}"),
    (
        "fp4_warp.cuh",
        "key_of(n, i % 2) > last_key[i / 2]",
        "key_of(n, i % 2) > last_key[i / 2] + 1",
        NUMBERS,
    ),
    ("sm80_fp4_delta.cu", "key < p.kv_len && ", "", OUTSIDE),
    # Barriers, and the ring of stages.
    ("sm80_fp4_delta.cu", "__syncthreads();", "", f"{RACE}|nothing was written"),
    ("token_reduction.cuh", "    __syncthreads();\n  }", "  }", f"{RACE}|nothing was written"),
    ("sm120_fp4_attention.cu", "ring.wait_until_empty();", "", f"{RACE}|{UNDER_WAY}"),
    (
        "sm120_fp4_attention.cu",
        "full(stage).wait(parity);",
        "",
        f"{RACE}|{UNDER_WAY}|nothing was written",
    ),
    (
        "sm120_fp4_attention.cu",
        "empty(i).init(32 * WARPS)",
        "empty(i).init(32 * WARPS - 32)",
        f"{RACE}|more arrivals|{UNDER_WAY}",
    ),
    ("sm120_fp4_attention.cu", "init(32 * WARPS)", "init(32 * WARPS + 1)", HANGS),
    ("sm120_fp4_attention.cu", "barrier.expect(STAGE);", "barrier.expect(STAGE + 16);", HANGS),
    (
        "sm120_fp4_attention.cu",
        "stage = 0, parity ^= 1",
        "stage = 0",
        f"{HANGS}|{RACE}|{UNDER_WAY}",
    ),
    # Numbers.
    ("fp4_warp.cuh", "out[n][i] *= shrink[i / 2]", "out[n][i] *= shrink[i % 2]", NUMBERS),
    ("fp4_warp.cuh", "ONE_SCALES = 0x38383838u", "ONE_SCALES = 0x38383840u", NUMBERS),
    ("ptx", "cvt.rn.satfinite.e2m1x2.f32 d, ", "cvt.rn.satfinite.e2m1x2.f32 c, ", NUMBERS),
]


def tensors(nq, nk):
    q, k, v = token_major((1, nq), (1, nk), (1, nk))
    k[..., :2] += 4
    return q, k, v


INT8_CALLS = [{"nq": 20, "nk": 7}, {"nq": 70, "nk": 333}, {"nq": 70, "nk": 70, "causal": True}]
FP4_CALLS = [{"nq": 20, "nk": 7}, {"nq": 40, "nk": 700}]


def check_int8(nq, nk, causal=False):
    q, k, v = tensors(nq, nk)
    out = sm80_int8.attend(q, k, v, mask=None, scale=0.125, causal=causal)
    assert compare(out, exact_attention(q, k, v, causal=causal)).rel_l1 < 0.03, NUMBERS


def check_fp4(nq, nk):
    q, k, v = tensors(nq, nk)
    out = sm120_fp4.attend(q, k, v, mask=None, scale=0.125, causal=False)
    _, operands = fp4_model.quantise(q, k, v, scale=0.125, q_block_tokens=128)
    model, _ = fp4_model.attend(operands, causal=False)
    assert compare(out, model).rel_l1 < 5e-3, NUMBERS


@pytest.mark.parametrize("call", INT8_CALLS)
def test_int8_without_a_fault(call, use):
    use(Simulator(80))
    check_int8(**call)


@pytest.mark.parametrize("call", FP4_CALLS)
def test_fp4_without_a_fault(call, use):
    use(Simulator(120))
    check_fp4(**call)


def check_all(check, calls):
    for call in calls:
        check(**call)


@pytest.mark.parametrize("fault", INT8_FAULTS, ids=lambda x: f"{x[0]}: {x[1][:30]} -> {x[2][:30]}")
def test_a_fault_in_int8_kernels_is_found(fault, use):
    use(Simulator(80, edit=fault[:3]))
    with pytest.raises((AssertionError, KernelError), match=fault[3]):
        check_all(check_int8, INT8_CALLS)


@pytest.mark.parametrize("fault", FP4_FAULTS, ids=lambda x: f"{x[0]}: {x[1][:30]} -> {x[2][:30]}")
def test_a_fault_in_fp4_kernels_is_found(fault, use):
    use(Simulator(120, edit=fault[:3]))
    with pytest.raises((AssertionError, KernelError), match=fault[3]):
        check_all(check_fp4, FP4_CALLS)
