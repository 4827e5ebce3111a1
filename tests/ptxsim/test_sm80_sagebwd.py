"""SageBwd on mma.sync, interpreted: its shapes, masks and refusals."""

from functools import partial

import pytest
import torch
from sageattention3.kernels.launch import sm80_sagebwd

from . import sagebwd_calls
from .calls import in_any_order
from .ptx import KernelError
from .sagebwd_calls import tensors
from .simulator import Simulator

run = partial(sagebwd_calls.gradients, sm80_sagebwd.train)
check = partial(sagebwd_calls.check, sm80_sagebwd.train)


@pytest.fixture(autouse=True)
def simulator(use):
    return use(Simulator(80))


@pytest.mark.parametrize("d", [40, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_head_dim_in_both_dtypes(d, dtype):
    check(*tensors(d=d, dtype=dtype))


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (33, 64), (32, 65), (130, 129), (20, 150)])
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_ends(nq, nk, causal):
    check(*tensors(nq=nq, nk=nk), causal=causal)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(kind, causal):
    q, k, v, d_out = tensors(hq=4, hk=2, nq=70, nk=70)
    mask = torch.rand(1, 4, 70, 70, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 0] = True
    mask[:, :, 9] = False
    if kind == "additive":
        bias = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
        mask = bias.masked_fill(~mask, -torch.inf)
    out, d_q, *_ = check(q, k, v, d_out, mask=mask, causal=causal)
    assert (out[:, :, 9] == 0).all()
    assert (d_q[:, :, 9] == 0).all()


def test_what_nobody_sees_gets_zero_and_leaks_nowhere():
    q, k, v, d_out = tensors(nq=40, nk=90)
    mask = (torch.arange(90) % 5 != 2).expand(1, 1, 40, 90).clone()
    mask[:, :, 7] = False
    hidden = ~mask[0, 0, 0]
    clean = run(q, k, v, d_out, mask=mask)
    k[:, :, hidden], v[:, :, hidden] = 1e4, torch.nan
    q[:, :, 7], d_out[:, :, 7] = torch.nan, torch.inf
    dirty = run(q, k, v, d_out, mask=mask)
    assert all(torch.equal(x, y) for x, y in zip(clean, dirty, strict=True))
    assert (clean[1][:, :, 7] == 0).all()
    assert all((x[:, :, hidden] == 0).all() for x in clean[2:])


def test_warps_may_come_in_any_order(simulator):
    given = tensors(nq=70, nk=100)
    in_any_order(simulator, range(4), lambda: run(*given))


def test_a_second_derivative_and_a_gradient_for_the_mask_are_refused():
    q, k, v, _ = tensors()
    options = {"scale": 0.1, "causal": False}
    out = sm80_sagebwd.train(q.requires_grad_(), k, v, mask=None, **options).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out, q, create_graph=True)
    mask = torch.zeros(1, 1, 40, 70, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient to the mask"):
        sm80_sagebwd.train(q, k, v, mask=mask, **options)


@pytest.mark.parametrize(
    "fault",
    [
        ("int8_layout.cuh", "8 * j + 2 * t + e", "8 * t + 2 * j + e"),  # rows of K and Q
        ("panels.cuh", "row * 32 + (byte ^ ((row & 4) << 2))", "row * 32 + byte % 16"),
        (
            "sagebwd_warp.cuh",
            "{rows[0][0], rows[1][0], rows[0][1], rows[1][1]}",
            "{rows[0][0], rows[0][1], rows[1][0], rows[1][1]}",
        ),
        ("sagebwd_warp.cuh", "weight[i / 2], sum", "weight[i % 2], sum"),
        ("sagebwd_rows.cuh", "x[n][i] = threadIdx.x & distance ?", "x[n][i] = false ?"),
        ("sagebwd_tile.cuh", "half * TILE_PANEL + rest", "rest"),  # the block's other keys
    ],
)
def test_a_fault_in_the_sources_is_noticed(fault, use):
    use(Simulator(80, edit=fault))
    with pytest.raises((AssertionError, KernelError)):
        check(*tensors(nq=45, nk=75))
