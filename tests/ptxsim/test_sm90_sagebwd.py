"""SageBwd on wgmma, interpreted: its shapes."""

from functools import partial

import pytest
import torch
from sageattention3.kernels.launch import sm90_sagebwd

from . import sagebwd_calls
from .calls import in_any_order
from .ptx import KernelError
from .sagebwd_calls import tensors
from .simulator import Simulator

run = partial(sagebwd_calls.gradients, sm90_sagebwd.train)
check = partial(sagebwd_calls.check, sm90_sagebwd.train)


@pytest.fixture(autouse=True)
def simulator(use):
    return use(Simulator(90))


@pytest.mark.parametrize("d", [40, 64, 104, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_head_dim_in_both_dtypes(d, dtype):
    check(*tensors(d=d, dtype=dtype))


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (64, 129), (65, 64), (130, 130), (20, 150)])
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_ends(nq, nk, causal):
    check(*tensors(nq=nq, nk=nk), causal=causal)


def test_causal_with_128_channels():
    check(*tensors(hq=1, nq=140, nk=140, d=128), causal=True)


def test_more_tiles_than_stages():
    check(*tensors(hq=1, nq=330, nk=330, d=128))


def test_queries_share_key_heads():
    q, k, v, d_out = tensors(hq=6, hk=2)
    check(q, k + torch.arange(2)[:, None, None], v, d_out)  # a wrong head shows at once


def test_keys_that_are_hidden_from_a_query_leak_nothing_into_it():
    q, k, v, d_out = tensors(hq=1, nq=100, nk=100, d=128)
    clean = run(q, k, v, d_out, causal=True)
    v[:, :, 70:] = v[:, :, 70:].flip(2)  # V's ranges, which its codes share, stay as they are
    dirty = run(q, k, v, d_out, causal=True)
    for x, y in zip(clean[:2], dirty[:2], strict=True):
        assert torch.equal(x[:, :, :70], y[:, :, :70])
        assert not torch.equal(x[:, :, 70:], y[:, :, 70:])


@pytest.mark.parametrize("d", [64, 128])
def test_warps_may_come_in_any_order(simulator, d):
    given = tensors(hq=1, nq=150, nk=140, d=d)
    in_any_order(simulator, range(4), lambda: run(*given))


FAULTS = {
    "rows of tiles are in another order": (
        "int8_layout.cuh",
        "8 * j + 2 * t + e",
        "8 * t + 2 * j + e",
    ),
    "panels are not swizzled": (
        "panels.cuh",
        "row * 32 + (byte ^ ((row & 4) << 2))",
        "row * 32 + byte",
    ),
    "rows of A change places": (
        "sagebwd_group.cuh",
        "{rows[0][2 * step], rows[1][2 * step],",
        "{rows[1][2 * step], rows[0][2 * step],",
    ),
    "a row has the other one's weight": ("sagebwd_group.cuh", "weight[i / 2 % 2]", "weight[i % 2]"),
    "a row is taken for another key": (
        "sagebwd_group.cuh",
        "quad_of_warp() / 2 * 4 + 2 * r",
        "quad_of_warp() / 2 * 4 + 2 * (1 - r)",
    ),
    "a tile is given back before its last product has ended": (
        "sagebwd_group.cuh",
        "  if constexpr (PARTS == 2) multiply",
        "  if (threadIdx.x % 32 == 0) ring.empty(turn.stage).arrive();\n"
        "  if constexpr (PARTS == 2) multiply",
    ),
    "dP is read before its product has ended": (
        "sm90_sagebwd_key_gradients.cu",
        "    wgmma_wait<0>();\n    pin(d_p);\n    wgmma_begin",
        "    wgmma_begin",
    ),
    "tiles are read before they have come": (
        "sagebwd_group.cuh",
        "  ring.full(next.stage).wait(next.parity);\n",
        "",
    ),
    "the last key is hidden": (
        "sm90_sagebwd_query_gradient.cu",
        "key > rows.last_key",
        "key >= rows.last_key",
    ),
    "dS lacks the scales of K": (
        "sm90_sagebwd_query_gradient.cu",
        "INT8_MAX, k_scale)",
        "INT8_MAX)",
    ),
    "dP lacks its offset": ("sm90_sagebwd_prepare.cu", "= -delta * slope", "= 0.0f"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, use):
    use(Simulator(90, edit=FAULTS[fault]))

    def check_few_keys_and_more_tiles_than_stages():
        check(*tensors(hq=1, nq=70, nk=9))
        check(*tensors(hq=1, nq=500, nk=600))

    with pytest.raises((AssertionError, KernelError)):
        check_few_keys_and_more_tiles_than_stages()
