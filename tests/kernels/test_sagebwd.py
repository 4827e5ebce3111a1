"""SageBwd against FP64 autograd: wiring, degenerate gradients, dtypes, refusals."""

from dataclasses import replace

import pytest
import torch
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import (
    SageBwdOptions,
    Scheme,
    exact_attention,
    sagebwd_attention,
)
from sageattention3.kernels.reference.sagebwd import TRAINING_FORWARD

# What the smoothed K is for.
RAW_K = SageBwdOptions(forward=replace(TRAINING_FORWARD, smooth_k=False))


def tensors(b=2, hq=4, hk=4, nq=96, nk=96, d=64, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((hq, nq), (hk, nk), (hk, nk), (hq, nq))
    return [torch.randn(b, h, n, d, generator=generator).to(dtype) for h, n in sizes]


def gradients(function, q, k, v, d_out, **arguments):
    """(out, dQ, dK, dV) of ``function`` for the upstream gradient d_out."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, **arguments)
    out.backward(d_out.to(out.dtype))
    return out.detach(), *(x.grad for x in leaves)


def errors(q, k, v, d_out, options=None, **arguments):
    """Errors of (out, dQ, dK, dV) against FP64."""
    given = {} if options is None else {"options": options}
    mine = gradients(sagebwd_attention, q, k, v, d_out, **given, **arguments)
    exact = [x.double() for x in (q, k, v, d_out)]
    true = gradients(exact_attention, *exact, **arguments)
    return [compare(x, y) for x, y in zip(mine, true, strict=True)]


def assert_close(all_errors, cosine=0.995):
    for name, e in zip(("out", "dQ", "dK", "dV"), all_errors, strict=True):
        assert e.finite, name
        # One key alone has P = 1 and no gradient: what is left there is rounding.
        assert e.cosine > cosine or e.rmse < 1e-6, (name, e)


@pytest.mark.parametrize(
    ("nq", "nk", "hq", "hk", "d"),
    [
        (96, 96, 4, 4, 64),
        (130, 77, 6, 2, 40),
        (1, 50, 2, 1, 128),
        (300, 200, 3, 1, 72),
        (7, 7, 2, 2, 8),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_agree_with_fp64_for_any_shape(nq, nk, hq, hk, d, causal):
    q, k, v, d_out = tensors(hq=hq, hk=hk, nq=nq, nk=nk, d=d)
    v = v + torch.arange(hk)[:, None, None]  # a wrong head shows at once
    assert_close(errors(q, k, v, d_out, causal=causal), cosine=0.99)


def test_gaussian_gradients_reach_the_bars():
    out, d_q, d_k, d_v = errors(*tensors(nq=512, nk=512, d=128))
    assert out.rel_l1 < 0.02
    assert min(d_q.cosine, d_k.cosine) > 0.998
    assert d_v.cosine > 0.999


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 80), (2, 1, 1, 80), (1, 1, 90, 80), (2, 4, 90, 80)])
def test_masks_are_honoured_in_both_passes(kind, shape):
    q, k, v, d_out = tensors(hk=2, nq=90, nk=80)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 0] = True
    if kind == "additive":
        mask = torch.where(mask, torch.randn(shape), -torch.inf)
    assert_close(errors(q, k, v, d_out, mask=mask), cosine=0.99)


def test_a_row_that_sees_nothing_gives_and_gets_nothing():
    q, k, v, d_out = tensors()
    mask = torch.ones(1, 1, 96, 96, dtype=torch.bool)
    mask[..., 5, :] = False
    out, d_q, *_ = gradients(sagebwd_attention, q, k, v, d_out, mask=mask)
    assert (out[:, :, 5] == 0).all()
    assert (d_q[:, :, 5] == 0).all()
    assert_close(errors(q, k, v, d_out, mask=mask), cosine=0.99)


def test_masked_keys_get_zero_gradients_and_leak_into_no_other():
    q, k, v, d_out = tensors(hk=2)
    keys = torch.arange(96) % 5 == 2
    mask = ~keys[None, None, None]
    clean = gradients(sagebwd_attention, q, k, v, d_out, mask=mask)
    k[:, :, keys], v[:, :, keys] = 1e4, torch.nan
    dirty = gradients(sagebwd_attention, q, k, v, d_out, mask=mask)
    for x, y in zip(clean, dirty, strict=True):
        assert torch.equal(x, y)
    assert (clean[2][:, :, keys] == 0).all()
    assert (clean[3][:, :, keys] == 0).all()


def test_a_shared_bias_of_k_does_not_reach_d_q():
    q, k, v, d_out = tensors(nq=512, nk=512, d=128)
    assert errors(q, k + 20, v, d_out)[1].cosine > 0.998
    assert errors(q, k + 20, v, d_out, RAW_K)[1].cosine < 0.8


def test_quantising_d_o_v_is_an_option_that_costs_accuracy():
    q, k, v, d_out = tensors(nq=256, nk=256, d=128)
    v = v + 3  # the part of dO V^T that cancels in dS, but not its error
    kept = errors(q, k, v, d_out)
    quantised = errors(q, k, v, d_out, SageBwdOptions(quantise_dov=True))
    assert quantised[1].rel_l1 > 1.2 * kept[1].rel_l1
    assert quantised[3] == kept[3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_have_the_dtypes_of_their_inputs(dtype, autocast):
    q, k, v, d_out = tensors(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = gradients(sagebwd_attention, q, k, v, d_out)
    assert all(x.dtype == dtype for x in results)
    assert all(
        torch.equal(x, y)
        for x, y in zip(results, gradients(sagebwd_attention, q, k, v, d_out), strict=True)
    )
    assert_close(errors(q, k, v, d_out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_zero_upstream_gradient_gives_exactly_zero(dtype):
    q, k, v, d_out = tensors(dtype=dtype)
    for x in gradients(sagebwd_attention, q, k, v, torch.zeros_like(d_out))[1:]:
        assert (x == 0).all()


def test_all_zero_inputs_give_finite_gradients():
    q, _, _, d_out = tensors()
    zero = torch.zeros_like(q)
    for x in gradients(sagebwd_attention, zero, zero, zero, d_out):
        assert torch.isfinite(x).all()


@pytest.mark.parametrize("unit", [1e-8, 1e-20, 1e8])
def test_the_unit_of_the_upstream_gradient_does_not_matter(unit):
    q, k, v, d_out = tensors()
    assert_close(errors(q, k, v, d_out * unit))


def test_a_few_large_rows_of_the_upstream_gradient_do_not_break_the_rest():
    q, k, v, d_out = tensors(nq=256)
    d_out = torch.nn.functional.normalize(d_out, dim=-1) * 1e-4
    d_out[:, :, [3, 100, 200]] *= 1e4
    assert_close(errors(q, k, v, d_out))


def test_an_overflowed_upstream_gradient_stays_visible_to_a_gradient_scaler():
    q, k, v, d_out = tensors(dtype=torch.float16)
    d_out[0, 0, 3, 3] = torch.inf
    _, d_q, d_k, d_v = gradients(sagebwd_attention, q, k, v, d_out)
    for x in (d_q, d_k, d_v):
        assert not torch.isfinite(x[0, 0]).all()
        assert torch.isfinite(x[1]).all()


def test_only_the_inputs_that_ask_get_a_gradient():
    q, k, v, d_out = tensors()
    v.requires_grad_()
    sagebwd_attention(q, k, v).backward(d_out)
    assert v.grad is not None
    assert q.grad is None


def test_strided_inputs_and_an_expanded_upstream_gradient_are_fine():
    q, k, v, _ = tensors()
    flat = torch.ones(1).expand_as(q)
    plain = gradients(sagebwd_attention, q, k, v, flat.contiguous())
    token_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for x, y in zip(plain, gradients(sagebwd_attention, *token_major, flat), strict=True):
        assert torch.equal(x, y)


def test_a_second_derivative_is_refused_rather_than_silently_zero():
    q, k, v, _ = tensors()
    out = sagebwd_attention(q.requires_grad_(), k, v).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out, q, create_graph=True)


def test_a_mask_that_wants_a_gradient_is_refused():
    q, k, v, _ = tensors()
    with pytest.raises(ValueError, match="no gradient to the mask"):
        sagebwd_attention(q, k, v, mask=torch.zeros(1, 1, 96, 96, requires_grad=True))


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="int8 or e4m3"):
        SageBwdOptions(gemm="fp4")
    with pytest.raises(ValueError, match="cannot be centred or rotated"):
        SageBwdOptions(forward=Scheme(qk="int8", pv="int8"))
