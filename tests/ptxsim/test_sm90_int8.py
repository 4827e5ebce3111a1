"""INT8 attention on wgmma, interpreted, against FP64 within the bounds that hold on a GPU."""

from functools import partial

import pytest
import torch
from sageattention3.kernels.launch.sm90_int8 import SM90_INT8, attend

from . import calls
from .ptx import KernelError
from .simulator import Simulator

BAR = 0.03  # of tests/gpu/test_sm90_int8.py


@pytest.fixture(autouse=True)
def simulator(use):
    return use(Simulator(90))


tensors = partial(calls.tensors, nq=70, nk=300, d=128)


def run(q, k, v, *, causal=False, **options):
    return attend(q, k, v, scale=q.shape[-1] ** -0.5, causal=causal, **options)


def check(simulator, q, k, v, *, causal=False, seeds=(0, 1, 2), bar=BAR):
    """Near exact attention, and the same bits however warps interleave."""
    out = calls.in_any_order(simulator, seeds, lambda: run(q, k, v, causal=causal))
    calls.check_near_exact(out, q, k, v, bar, causal=causal)


@pytest.mark.parametrize(
    ("d", "dtype"),
    [
        (40, torch.bfloat16),
        (64, torch.float16),
        (96, torch.float32),
        (104, torch.float16),
        (128, torch.bfloat16),
    ],
)
def test_any_head_dim_and_dtype(simulator, d, dtype):
    check(simulator, *tensors(d=d, dtype=dtype), seeds=(0, 3))


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (64, 128), (193, 129), (5, 400)])
def test_ragged_ends(simulator, nq, nk):
    check(simulator, *tensors(nq=nq, nk=nk), seeds=(0, 1))


@pytest.mark.parametrize(("nq", "nk"), [(300, 300), (150, 400), (300, 150)])
def test_causal(simulator, nq, nk):
    check(simulator, *tensors(nq=nq, nk=nk), causal=True, seeds=(0, 4))


def test_a_prepared_call_computes_tensors_wherever_they_start():
    q, k, v = tensors()
    compute = SM90_INT8.prepare(q, k, v, causal=False)
    for start in (0, 1):
        moved = (q, k, calls.elsewhere(v, start))
        assert torch.equal(compute(*moved, mask=None, scale=q.shape[-1] ** -0.5), run(q, k, v))


def test_more_tiles_than_stages(simulator):
    check(simulator, *tensors(hq=1, nk=1100))


def many(**options):
    """Several blocks for each head."""
    return tensors(hq=5, nq=200, nk=300, **options)


@pytest.mark.parametrize("d", [64, 128])
def test_many_blocks(simulator, d):
    check(simulator, *many(d=d))
    check(simulator, *many(d=d, b=2), seeds=(0, 5))


def with_a_nan():
    """NaN in one head of Q, which others must not see."""
    q, k, v = many()
    q[:, 0] = torch.nan
    return q, k, v


def check_other_heads(q, k, v):
    out = run(q, k, v)
    assert not out[:, 0].isfinite().any()
    calls.check_near_exact(out[:, 1:], q[:, 1:], k, v, BAR)


def test_a_nan_stays_in_its_head():
    check_other_heads(*with_a_nan())


def growing(nk=1100):
    """Each tile's scores are far above those before it: references move."""
    q, k, v = tensors(hq=1, nk=nk)
    return q, (k * torch.linspace(0.5, 40, nk)[:, None]).bfloat16(), v


def test_keys_that_grow_move_the_references(simulator):
    check(simulator, *growing(), seeds=(0,), bar=0.1)


@pytest.mark.parametrize("causal", [False, True])
def test_scores_too_large_for_the_fast_path(simulator, causal):
    """Softmax picks one key per row, but for rows of zeros, which take the mean of V."""
    q, k, v = tensors(nq=150, nk=150)
    q = q * 300
    q[:, :, ::3] = 0
    check(simulator, q, k * 20, v, causal=causal, seeds=(0,), bar=0.1)


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
    "scores are read before their product has ended": ("wgmma_wait<0>();\n    pin(s);", "pin(s);"),
    "P V is added before its product has ended": (
        "wgmma_wait<0>();\n    pin(product);",
        "pin(product);",
    ),
    "V is given back before its product has ended": (
        "    multiply_values(product);\n",
        "    shared.empty_v(turn.stage).arrive();\n    multiply_values(product);\n",
    ),
    "scales are given back before they are read": (
        "e.find(s, q_scale, shared.k_scales(turn.stage) + t() * 4);\n"
        "    shared.empty_k(turn.stage).arrive();\n",
        "shared.empty_k(turn.stage).arrive();\n"
        "    e.find(s, q_scale, shared.k_scales(turn.stage) + t() * 4);\n",
    ),
    "scales are not waited for": ("expect(TILE + SCALES)", "expect(TILE)"),
    "scales of V are not waited for": ("expect(TILE + first)", "expect(TILE)"),
    "scales of V are not there": ("if (tile == 0) full_v.copy", "if (tile == 1) full_v.copy"),
    "offsets of V are its scales": ("(HEAD_DIM + channel) * 4", "channel * 4"),
    "Q is not waited for": ("publish_to_wgmma();\n    synchronise<GROUP>(1 + group);\n", ""),
    "the last key is hidden": (">= visible)", ">= visible - 1)"),
    "a key too many is seen": (">= visible)", "> visible)"),
    "the output does not follow its reference": ("*= shrink[i / 2 % 2]", "*= 1.0f"),
    "tiles weigh the same": (
        "weight[r] = weight_of(e.top[r], reference[r])",
        "weight[r] = exp2_approx(LOG2_WEIGHT)",
    ),
}


def check_long_and_short(simulator):
    check(simulator, *growing(), bar=0.1)
    check(simulator, *tensors(hq=1, nq=3, nk=3), bar=0.1)
    check(simulator, *many(), bar=0.1)
    check(simulator, *many(d=64), bar=0.1)
    check_other_heads(*with_a_nan())


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(use, fault):
    simulator = use(Simulator(90, edit=("sm90_int8_attention.cu", *FAULTS[fault])))
    with pytest.raises((AssertionError, KernelError)):
        check_long_and_short(simulator)


@pytest.mark.parametrize(
    ("file", "text", "other", "message"),
    [
        (
            "sm90_int8_exponents.cuh",
            "k_scales + block * (SCALES_PER_BLOCK * 4)",
            "k_scales",
            "rel_l1=",
        ),
        ("sm90_int8_attention.cu", "publish_to_wgmma();", "", "no proxy fence"),
        ("sm90_int8_attention.cu", "wgmma_begin();", "", r"no wgmma\.fence"),
        ("sm90_int8_attention.cu", "wgmma_commit();", "", "rel_l1=|same bits|no wgmma"),
    ],
)
def test_faults_are_found_for_what_they_are(use, file, text, other, message):
    simulator = use(Simulator(90, edit=(file, text, other)))
    with pytest.raises((AssertionError, KernelError), match=message):
        check_long_and_short(simulator)
