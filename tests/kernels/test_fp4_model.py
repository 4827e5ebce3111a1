"""The torch model of the NVFP4 kernels against the scheme it stands for and exact attention."""

import pytest
import torch
from sageattention3.benchmarks.accuracy import load_layers
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import (
    SCHEMES,
    exact_attention,
    fp4_model,
    reference_attention,
)
from sageattention3.kernels.reference.formats import quantise_nvfp4
from sageattention3.kernels.reference.fp4_layout import pack_blocks, unpack_blocks


def tensors(b=1, hq=2, hk=None, nq=200, nk=None, d=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hk, nk = hk or hq, nk or nq
    return [torch.randn(b, h, n, d, generator=generator) for h, n in ((hq, nq), (hk, nk), (hk, nk))]


def model(q, k, v, *, causal=False, mask=None, scale=None, smooth_q=True, live=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _, operands = fp4_model.quantise(
        q, k, v, scale=scale, q_block_tokens=96, smooth_q=smooth_q, live=live
    )
    return fp4_model.attend(operands, causal=causal, mask=mask)[0]


def test_blocks_are_quantised_as_the_scheme_quantises_them():
    x = torch.randn(4, 50, 128, generator=torch.Generator().manual_seed(0))
    reference = quantise_nvfp4(x, search=True)
    codes, scales = fp4_model.quantise_blocks(x / reference.tensor_scale)
    mine = fp4_model.dequantise_blocks(codes, scales)
    theirs = reference.without_tensor_scale()
    # FP16 chooses otherwise where two scales serve as well, and rounds otherwise near a tie.
    assert (mine == theirs).float().mean() > 0.99
    exact = x / reference.tensor_scale
    assert (mine - exact).square().mean() < 1.0005 * (theirs - exact).square().mean()


@pytest.mark.parametrize("d", [40, 64, 96, 128, 256])
@pytest.mark.parametrize(("hq", "hk"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_model_is_as_far_from_exact_attention_as_the_scheme(d, hq, hk, causal):
    q, k, v = tensors(hq=hq, hk=hk, nq=200, nk=333, d=d)
    k[..., :2] += 8
    right = exact_attention(q, k, v, causal=causal)
    scheme = reference_attention(q, k, v, scheme=SCHEMES["fp4"], causal=causal)
    live = torch.arange(333).view(1, 1, -1) < (200 if causal else 333)
    mine = compare(model(q, k, v, causal=causal, live=live), right)
    assert mine.rel_l1 < 1.1 * compare(scheme, right).rel_l1


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_hide_and_bias_as_in_exact_attention(kind):
    q, k, v = tensors(nq=70, nk=200)
    mask = torch.rand(1, 2, 70, 200, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[:, :, 3] = False
    if kind == "additive":
        bias = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
        mask = bias.masked_fill(~mask, -torch.inf)
    out, right = model(q, k, v, mask=mask), exact_attention(q, k, v, mask=mask)
    assert (out[:, :, 3] == 0).all()
    scheme = reference_attention(q, k, v, scheme=SCHEMES["fp4"], mask=mask)
    assert compare(out, right).rel_l1 < 1.1 * compare(scheme, right).rel_l1


def test_a_row_of_lowest_biases_attends_evenly():
    q, k, v = tensors(nq=20, nk=100)
    bias = torch.zeros(1, 1, 20, 100)
    bias[:, :, 5] = torch.finfo(torch.float32).min
    out = model(q, k, v, mask=bias)
    assert compare(out[:, :, 5], exact_attention(q, k, v, mask=bias)[:, :, 5]).rel_l1 < 0.2


def test_real_tensors_lose_less_than_the_published_scheme():
    layers = load_layers()
    errors = [
        compare(model(*qkv, causal=True), exact_attention(*qkv, causal=True)) for qkv in layers
    ]
    assert sum(e.rel_l1 for e in errors) / len(errors) < 0.14  # .151 as published


@pytest.mark.parametrize("c", [1e-4, 1e-2, 7.0, 1e4])
def test_results_scale_as_their_operands_do(c):
    q, k, v = tensors(nq=100, nk=150)
    base, right = model(q, k, v), exact_attention(q, k, v)
    noise = compare(base, right).rel_l1
    assert compare(model(q, k, v * c) / c, base).rel_l1 < 0.1 * noise
    assert compare(model(q * c, k / c, v), base).rel_l1 < 0.1 * noise


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-6])
def test_any_scale(scale):
    q, k, v = tensors()
    out, right = model(q, k, v, scale=scale), exact_attention(q, k, v, scale=scale)
    scheme = reference_attention(q, k, v, scheme=SCHEMES["fp4"], scale=scale)
    assert compare(out, right).rel_l1 < 1.1 * compare(scheme, right).rel_l1


@pytest.mark.parametrize("size", [1e3, 1e9, 1e30])
def test_rows_of_huge_scores_keep_their_maximum(size):
    q, k, v = tensors(nq=100, nk=150)
    out = model(q * size, k * size, v)
    assert out.isfinite().all()
    weight = out.norm(dim=-1) / v.norm(dim=-1).mean()
    assert (weight > 0.5).all()  # of one key each


def test_constant_operands_lose_nothing_to_their_means():
    q, k, v = (torch.full((1, 1, 40, 64), x) for x in (3.0, -2.0, 5.0))
    assert compare(model(q, k, v), exact_attention(q, k, v)).rel_l1 < 1e-6


def test_log_sum_exp_is_that_of_the_scores_of_smoothed_keys():
    q, k, v = tensors(nq=100, nk=150)
    scale = 0.1
    _, operands = fp4_model.quantise(q, k, v, scale=scale, q_block_tokens=96)
    _, lse = fp4_model.attend(operands, causal=False)
    right = (q @ (k - k.mean(2, keepdim=True)).mT * scale).logsumexp(-1)
    assert (lse - right).abs().mean() < 0.03


def test_codes_go_through_the_bytes_of_the_layout():
    q, k, v = tensors(nk=130, d=96)
    codes, operands = fp4_model.quantise(q, k, v, scale=0.1, q_block_tokens=96)
    back = unpack_blocks(pack_blocks(codes.kv), 96)
    again = fp4_model.dequantise_blocks(back.k, back.k_scales).flatten(2, 3)
    assert torch.equal(again, operands.k)
    again = fp4_model.dequantise_blocks(back.v, back.v_scales).movedim(2, 3).flatten(3)
    assert torch.equal(again, operands.v)
