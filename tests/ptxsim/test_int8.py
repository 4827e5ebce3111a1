"""INT8 kernels, interpreted, against FP64 within the bounds that hold on a GPU."""

import pytest
import torch
from sageattention3.kernels.launch.sm80_int8 import SM80_INT8, attend
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import exact_attention

from .calls import check_near_exact, elsewhere, in_any_order, tensors
from .simulator import Simulator

# Of tests/gpu/test_sm80_int8.py.
BAR = 0.03
SEEDS = (0, 1)


@pytest.fixture(autouse=True)
def simulator(request, use):
    return use(Simulator(getattr(request, "param", 80)))


# Kernels for the newest chips round P by other instructions.
on_old_and_new_chips = pytest.mark.parametrize("simulator", [80, 120], indirect=True)


def random_mask(*shape, share=0.6):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < share


def run(q, k, v, *, mask=None, causal=False, **options):
    return attend(q, k, v, mask=mask, scale=q.shape[-1] ** -0.5, causal=causal, **options)


def check(simulator, q, k, v, seeds=SEEDS, **options):
    """Near exact attention, and the same bits however warps interleave."""
    out = in_any_order(simulator, seeds, lambda: run(q, k, v, **options))
    check_near_exact(out, q, k, v, BAR, **options)
    return out


@on_old_and_new_chips
@pytest.mark.parametrize(
    ("d", "dtype"),
    [
        (40, torch.float16),
        (64, torch.float32),
        (96, torch.bfloat16),
        (128, torch.float16),
        (256, torch.bfloat16),
    ],
)
def test_any_head_dim_in_any_dtype(simulator, d, dtype):
    check(simulator, *tensors(nq=70, nk=133, d=d, dtype=dtype), seeds=(0, 3))


@pytest.mark.parametrize(
    ("nq", "nk"), [(1, 1), (17, 64), (64, 65), (65, 128), (129, 129), (70, 400)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_ends(simulator, nq, nk, causal):
    check(simulator, *tensors(nq=nq, nk=nk), causal=causal)


def test_what_lies_behind_the_last_key_is_not_read(simulator):
    q, k, v = tensors(nk=320)
    for nk in (1, 63, 65, 127, 129, 200):
        k[:, :, nk:], v[:, :, nk:] = 1e4, torch.inf
        given = q, k[:, :, :nk], v[:, :, :nk]
        check(simulator, *given, seeds=(0,))
        q, k, v = tensors(nk=320)


def test_queries_share_key_heads(simulator):
    check(simulator, *tensors(b=2, hq=6, hk=3, nq=70, nk=150))


@on_old_and_new_chips
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(simulator, kind, causal):
    q, k, v = tensors(hq=4, hk=2, nq=70, nk=70)
    mask = random_mask(1, 4, 70, 70)
    mask[..., 0] = True
    mask[:, :, [9, 64]] = False
    if kind == "additive":
        bias = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
        mask = bias.masked_fill(~mask, -torch.inf)
    assert (check(simulator, q, k, v, mask=mask, causal=causal)[:, :, [9, 64]] == 0).all()


@pytest.mark.parametrize("bias", [-1e8, -1.1e8, -2e8, -2.5e8])
def test_biases_so_large_that_their_sums_are_rounded(bias):
    """There FP32 counts by eights: a reference must not be taken for nearer than it is."""
    q, k, v = tensors(hq=1, nq=16, nk=128)
    for step in (16, 24, 32):
        mask = torch.full((1, 1, 16, 128), bias)
        mask[..., 64:] += step
        assert run(q, k, v, mask=mask).isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_prepared_call_computes_tensors_wherever_they_start(simulator, causal):
    q, k, v = tensors(nq=70, nk=70)
    compute = SM80_INT8.prepare(q, k, v, causal=causal)
    expected = run(q, k, v, causal=causal)
    for start in (0, 1, 8):
        moved = (q, elsewhere(k, start), elsewhere(v, start))
        assert torch.equal(compute(*moved, mask=None, scale=q.shape[-1] ** -0.5), expected)


def test_only_calls_of_tensors_that_kernels_read_where_they_lie_are_prepared():
    q, k, v = tensors(nq=70, nk=80)
    assert SM80_INT8.prepare(q, k, v, causal=False)
    assert not SM80_INT8.prepare(q, k, v, causal=True), "keys behind the last query are cut off"
    assert not SM80_INT8.prepare(q, k.half(), v, causal=False)
    assert not SM80_INT8.prepare(q, k, v.half(), causal=False)
    assert not SM80_INT8.prepare(*(x[..., :60] for x in (q, k, v)), causal=False)


def test_hidden_keys_cannot_matter(simulator):
    q, k, v = tensors(nk=333)
    mask = random_mask(1, 1, 1, 333)
    expected = check(simulator, q, k, v, mask=mask, seeds=(0,))
    hidden = ~mask[0, 0, 0]
    k[:, :, hidden], v[:, :, hidden] = 3e4, -3e4
    assert torch.equal(run(q, k, v, mask=mask), expected)


def test_values_cut_into_chunks(simulator):
    """Long enough for the second launch that joins the ranges of chunks."""
    check(simulator, *tensors(hq=1, nq=16, nk=1100), seeds=(0, 4))


def test_log_sum_exp_is_that_of_the_scores(simulator):
    q, k, v = tensors(dtype=torch.float32)
    mask = random_mask(1, 1, 40, 140)
    mask[:, :, 9] = False
    _, lse = run(q, k, v, mask=mask, return_lse=True)
    scores = q @ k.repeat_interleave(2, 1).mT * 64**-0.5
    right = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    seen = right.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert (lse - right)[seen].abs().max() < 0.2


def test_nan_reaches_the_output_and_huge_numbers_stay_finite(simulator):
    for index in range(3):
        given = tensors(hq=1)
        given[index][0, 0, 3, 5] = torch.nan
        assert run(*given).isnan().any()
    assert run(*(x.float() * 1e37 for x in tensors(hq=1))).isfinite().all()


def test_large_scores_take_the_exact_path(simulator):
    q, k, v = tensors(nk=270, dtype=torch.float32)
    out = run(300 * q, 300 * k, v)
    assert compare(out, exact_attention(300 * q, 300 * k, v)).rel_l1 < 0.3
