"""INT8 attention on wgmma, interpreted, against FP64 within the bounds that hold on a GPU."""

from functools import partial

import pytest
import torch
from sageattention3.kernels.launch.sm90_int8 import attend

from . import calls
from .ptx import KernelError
from .simulator import Simulator

BAR = 0.02  # of tests/gpu/test_sm90_int8.py


@pytest.fixture(autouse=True)
def simulator(use):
    return use(Simulator(90))


tensors = partial(calls.tensors, nq=70, nk=300, d=128)


def run(q, k, v, *, causal=False, **options):
    return attend(q, k, v, scale=q.shape[-1] ** -0.5, causal=causal, **options)


def check(simulator, q, k, v, *, causal=False, seeds=(0, 1, 2)):
    """Near exact attention, and the same bits however warps interleave."""
    out = calls.in_any_order(simulator, seeds, lambda: run(q, k, v, causal=causal))
    calls.check_near_exact(out, q, k, v, BAR, causal=causal)


@pytest.mark.parametrize("d", [104, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_head_dim_in_either_dtype(simulator, d, dtype):
    check(simulator, *tensors(d=d, dtype=dtype), seeds=(0, 3))


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (64, 128), (129, 129), (5, 400)])
def test_ragged_ends(simulator, nq, nk):
    check(simulator, *tensors(nq=nq, nk=nk), seeds=(0, 1))


@pytest.mark.parametrize(("nq", "nk"), [(300, 300), (150, 400), (300, 150)])
def test_causal(simulator, nq, nk):
    check(simulator, *tensors(nq=nq, nk=nk), causal=True, seeds=(0, 4))


def test_more_tiles_than_stages(simulator):
    check(simulator, *tensors(hq=1, nk=700))


def test_keys_that_grow_move_the_references(simulator):
    q, k, v = tensors(nk=450)
    check(simulator, q, (k * torch.linspace(0.1, 4, 450)[:, None]).bfloat16(), v, seeds=(0,))


def test_what_lies_behind_the_last_key_is_not_read(simulator):
    q, k, v = tensors(nk=320)
    k[:, :, 200:], v[:, :, 200:] = 1e4, torch.inf
    check(simulator, q, k[:, :, :200], v[:, :, :200], seeds=(0,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_largest_inputs_give_finite_outputs(dtype):
    largest = 6e4 if dtype == torch.float16 else 1e36
    given = [(x.float() * largest).clamp(-largest, largest).to(dtype) for x in tensors(nk=200)]
    assert run(*given).isfinite().all()


def test_lse_is_that_of_the_scores():
    q, k, v = tensors()
    _, lse = run(q, k, v, return_lse=True)
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    assert (lse - scores.logsumexp(-1)).abs().max() < 0.05


FAULTS = {
    "a stage is given back before P V has ended": (
        "    // The wait stands in two",
        "    leave_tile();\n    // The wait stands in two",
    ),
    "scores are read before their product has ended": ("wgmma_wait<1>();", "wgmma_wait<2>();"),
    "V's panels are one row off": ("(KEYS * 128) + row * 128", "(KEYS * 128) + (row ^ 1) * 128"),
    "V's units are not swizzled": ("(unit % 8 ^ row % 8) * 16", "unit % 8 * 16"),
    "the last key is left out": ("key + 8 * i < end", "key + 8 * i < end - 1"),
    "the last key is hidden": ("> last_key[", ">= last_key["),
    "the output does not follow its reference": ("*= shrink[i / 2 % 2]", "*= 1.0f"),
    "K's blocks share a scale": ("(tile * BLOCKS + block) * SCALES", "tile * BLOCKS * SCALES"),
    "V's copies are not waited for": ("wait_for_copies<PRODUCER_LEAD>();", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(use, fault):
    simulator = use(Simulator(90, edit=("sm90_int8_attention.cu", *FAULTS[fault])))
    q, k, v = tensors(hq=1, nk=700)
    k = (k * torch.linspace(0.5, 4, 700)[:, None]).bfloat16()
    with pytest.raises((AssertionError, KernelError)):
        check(simulator, q, k, v)
