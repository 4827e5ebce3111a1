"""SageBwd's kernels, interpreted: what holds on every instruction set that they are written for."""

from functools import partial

import pytest
import torch
from sageattention3.kernels.launch import sm80_sagebwd, sm90_sagebwd

from . import sagebwd_calls
from .sagebwd_calls import tensors
from .simulator import Simulator


@pytest.fixture(params=[(80, sm80_sagebwd.train), (90, sm90_sagebwd.train)], ids=["sm80", "sm90"])
def train(request, use):
    sm, train = request.param
    use(Simulator(sm))
    return train


@pytest.fixture
def run(train):
    return partial(sagebwd_calls.gradients, train)


@pytest.fixture
def check(train):
    return partial(sagebwd_calls.check, train)


def test_memory_behind_the_ends_does_not_matter(run):
    q, k, v, d_out = tensors(nq=45, nk=75)
    expected = run(q, k, v, d_out)

    def poisoned(x):
        longer = torch.full((1, x.shape[2] + 60, x.shape[1], x.shape[3]), torch.nan, dtype=x.dtype)
        longer[:, : x.shape[2]] = x.transpose(1, 2)
        return longer.transpose(1, 2)[:, :, : x.shape[2]]

    again = run(*map(poisoned, (q, k, v, d_out)))
    assert all(torch.equal(x, y) for x, y in zip(expected, again, strict=True))


def test_any_strides_give_the_same_bits(run):
    q, k, v, d_out = tensors(d=40)
    expected = run(q, k, v, torch.ones_like(d_out))
    channels = [x.mT.contiguous().mT for x in (q, k, v)]
    one = torch.ones((), dtype=q.dtype).expand_as(d_out)
    again = run(*channels, one)
    assert all(torch.equal(x, y) for x, y in zip(expected, again, strict=True))


def test_the_unit_of_the_upstream_gradient_does_not_matter(check):
    q, k, v, d_out = tensors()
    for unit in (1e-20, 1e8):
        check(q, k, v, d_out * unit)


def test_a_few_large_rows_of_the_upstream_gradient_do_not_break_the_rest(check):
    q, k, v, d_out = tensors(nq=100)
    d_out = torch.nn.functional.normalize(d_out, dim=-1) * 1e-4
    d_out[:, :, [3, 70]] *= 1e4
    check(q, k, v, d_out)


def test_no_upstream_gradient_is_none_and_an_infinite_one_shows(run):
    q, k, v, d_out = tensors(dtype=torch.float16)
    assert all((x == 0).all() for x in run(q, k, v, torch.zeros_like(d_out))[1:])
    d_out[0, 0, 3, 3] = torch.inf
    assert not any(x.isfinite().all() for x in run(q, k, v, d_out)[1:])


def test_nan_reaches_the_gradients(run):
    for index in range(3):
        given = tensors(hq=1)
        given[index][0, 0, 3, 5] = torch.nan
        assert any(x.isnan().any() for x in run(*given)[1:])


def test_a_query_of_zeros_has_its_gradient(check):
    q, k, v, d_out = tensors()
    q[:, :, 5] = 0
    check(q, k, v, d_out)
