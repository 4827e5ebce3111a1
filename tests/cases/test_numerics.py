"""Values that break quantisers: zeros, biases, infinities, the ends of FP16, a dominating key."""

import logging

import pytest
import torch
from sageattention3.kernels import attention
from sageattention3.kernels.metrics import compare

from .calls import QUANTISED, Patched, assert_accurate, core_attention, exact, tensors

# Distance of neighbouring values of V relative to the largest that shares their scale; of E2M1's
# distances the one in the middle of its range.
STEP = {"fp4": 1 / 6, "int8_fp4": 1 / 6, "int8": 1 / 127}

each_precision = pytest.mark.parametrize("precision", QUANTISED)


# ------------------------------------------------------------------------- QA-02: groups of zeros
def zero_value_channel(q, k, v):
    v[..., 7] = 0


def value_token_of_one_number(q, k, v):
    v[:, :, 3] = 0.001


def tile_of_zeros(q, k, v):
    k[:, :, 64:128] = v[:, :, 64:128] = 0
    q[:, :, :128] = 0


def head_of_zeros(q, k, v):
    q[:, 1] = k[:, 1] = v[:, 1] = 0


def equal_keys(q, k, v):
    k[:] = k[:, :, 3:4].clone()


def zero_queries(q, k, v):
    q.zero_()


def degenerate(change, dtype):
    q, k, v = tensors(nq=150, nk=200, dtype=dtype)
    change(q, k, v)
    return q, k, v


@each_precision
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        zero_value_channel,
        value_token_of_one_number,
        tile_of_zeros,
        head_of_zeros,
        equal_keys,
        zero_queries,
    ],
)
def test_groups_whose_scale_is_zero_harm_nobody(precision, dtype, change):
    """QA-02: 0/0 in one token or channel turned whole outputs to NaN."""
    q, k, v = degenerate(change, dtype)
    out = attention(q, k, v, precision=precision)
    assert_accurate(out, exact(q, k, v), precision)
    if change is zero_value_channel:
        assert (out[..., 7] == 0).all()
    if change is head_of_zeros:
        assert (out[:, 1] == 0).all()


@each_precision
@pytest.mark.parametrize("change", [equal_keys, zero_queries])
def test_attention_without_preference_is_the_plain_mean_of_v(precision, change):
    """QA-02: equal keys leave nothing of K once its mean is gone."""
    q, k, v = degenerate(change, torch.float16)
    out = attention(q, k, v, precision=precision).double()
    torch.testing.assert_close(out, out[:, :, :1].expand_as(out), rtol=0, atol=1e-4)
    # A rounding error is uniform within half a step; the mean of N of them has a standard deviation
    # of 0.29 steps / sqrt(N), and no output is off by more than three and a half of those.
    step = v.double().abs().amax(2, keepdim=True) * STEP[precision]
    mean = v.double().mean(2, keepdim=True)
    assert ((out - mean).abs() < step / v.shape[2] ** 0.5).all()


@each_precision
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_but_zeros_gives_zeros(precision, dtype):
    """QA-02: null tokens are zeros in q, k and v at once."""
    zero = torch.zeros(1, 2, 150, 64, dtype=dtype)
    assert (attention(zero, zero, zero, precision=precision) == 0).all()


# ------------------------------------------------------------------------ QA-03: a bias of all keys
def keys_with_bias(bias):
    q, k, v = tensors(nk=1024, d=128)
    k = (k * 32).round() / 32  # so that K + bias is exact in FP16
    return q, k, k + bias, v


def in_six_channels(value):
    bias = torch.zeros(128, dtype=torch.float16)
    bias[[0, 1, 17, 40, 41, 100]] = value
    return bias


each_bias = pytest.mark.parametrize(
    "bias", [torch.tensor(20.0).half(), in_six_channels(40.0)], ids=["all", "six channels"]
)


@each_precision
@each_bias
def test_a_bias_that_all_keys_share_costs_no_accuracy(precision, bias):
    """QA-03: noise on models with a large K bias where smoothing was off."""
    q, _, biased, v = keys_with_bias(bias)
    assert_accurate(attention(q, biased, v, precision=precision), exact(q, biased, v), precision)


@each_precision
@each_bias
def test_a_bias_that_all_keys_share_changes_less_than_quantising_does(precision, bias):
    """QA-03, metamorphic: softmax does not see K + c, nor may the result, beyond its noise."""
    q, k, biased, v = keys_with_bias(bias)
    out = attention(q, k, v, precision=precision)
    noise = compare(out, exact(q, k, v))
    change = compare(attention(q, biased, v, precision=precision), out)
    assert change.rel_l1 < 0.5 * noise.rel_l1
    assert change.worst_row_rel_l1 < noise.worst_row_rel_l1


# ------------------------------------------------------------- QA-04: K in a few channels, no bias
def concentrated_keys():
    q, k, v = tensors(nk=512, d=128)
    q[..., [3, 50]] /= 30
    k[..., [3, 50]] *= 30
    return q, k, v


def test_int8_is_accurate_where_two_channels_carry_the_keys():
    """QA-04: last blocks garbled letters; no mean to subtract, a row's scale loses the rest."""
    call = concentrated_keys()
    assert compare(attention(*call, precision="int8"), exact(*call)).cosine > 0.995


def test_fp4_loses_no_more_there_than_elsewhere():
    """QA-04: channels are balanced between Q and K before they are rotated."""
    plain, concentrated = (
        compare(attention(*call, precision="fp4"), exact(*call)).rel_l1
        for call in (tensors(nk=512, d=128), concentrated_keys())
    )
    assert concentrated < 1.1 * plain


def test_the_error_tells_a_layer_of_sharp_rows_from_others_in_fp4_and_not_in_int8():
    """QA-04: what FP4 cannot do must be told from what it can, not be averaged away."""
    q, k, v = tensors(nk=512, d=128)
    calls = {"plain": (q, k, v), "sharp": (16 * q, k, v)}
    errors = {
        (precision, name): compare(attention(*call, precision=precision), exact(*call)).rel_l1
        for precision in ("fp4", "int8")
        for name, call in calls.items()
    }
    assert errors.pop(("fp4", "sharp")) > 0.3
    assert max(errors.values()) < 0.3


# -------------------------------------------------------------------------------- QA-06: few keys
def short_call(kv, batch=476):
    # The reported call was (476, 20, 12, 128); two heads are as good as twenty.
    q, k, v = tensors(b=batch, hq=2, nq=12, nk=kv, d=128, spread=1.0)
    k[:, :, 0] *= 10
    return q, k, v


@pytest.mark.host
@pytest.mark.parametrize("kv", [1, 2, 7, 12])
@pytest.mark.parametrize("preset", ["balanced", "quality", "speed"])
def test_calls_with_few_keys_stay_with_the_host_and_the_log_says_why_once(preset, kv, caplog):
    """QA-06: smoothing and shared scales hurt over a dozen keys."""
    patched = Patched(preset=preset, cross_attention="same")
    caplog.clear()
    call = (*short_call(kv), 2)
    expected = core_attention()(*call, skip_reshape=True)
    with caplog.at_level(logging.INFO, logger="sageattention3"):
        for _ in range(3):
            assert torch.equal(patched(*call, skip_reshape=True), expected)
        patched.session.end_run()
    [record] = caplog.records
    assert "All 3 attention calls stayed with the host" in record.getMessage()
    assert record.getMessage().count("fewer than min_tokens=1024") == 1


@pytest.mark.host
@pytest.mark.parametrize(("tokens", "precision"), [(1023, "fp16"), (1024, "int8")])
def test_the_threshold_is_the_documented_number_of_tokens(tokens, precision):
    """QA-06: what lies below the threshold, and only that, is the host's."""
    patched = Patched()
    patched(*tensors(hq=1, nq=tokens, d=16), 1, skip_reshape=True)
    assert patched.precisions == [precision]


@each_precision
@pytest.mark.parametrize("kv", [1, 2, 7, 12])
def test_few_keys_are_still_right_for_those_who_lower_the_threshold(precision, kv):
    """QA-06: smoothing over few keys must be no worse than over many."""
    q, k, v = short_call(kv, batch=24)
    assert_accurate(attention(q, k, v, precision=precision), exact(q, k, v), precision)


# -------------------------------------------------------------------------- QA-08: NaN and infinity
def nan_query(q, k, v):
    q[0, 0, 5] = torch.nan


def infinite_key(q, k, v):
    k[0, 1, 9, 3] = torch.inf


def infinite_value(q, k, v):
    v[0, 1, 9, 3] = -torch.inf


def nan_in_each(q, k, v):
    q[0, 0, 5, 1] = k[0, 1, 70, 2] = v[0, 0, 64, 3] = torch.nan


@each_precision
@pytest.mark.parametrize("change", [nan_query, infinite_key, infinite_value, nan_in_each])
def test_what_is_not_finite_comes_out_exactly_where_sdpa_puts_it(precision, change):
    """QA-08: neither hidden behind constants nor spread by a shared scale or mean."""
    q, k, v = tensors(b=2, nq=140)
    clean = attention(q, k, v, precision=precision)
    change(q, k, v)
    out, expected = attention(q, k, v, precision=precision), exact(q, k, v)
    for is_bad in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(is_bad(out), is_bad(expected))
    assert not out[0].isfinite().all()
    assert torch.equal(out[1], clean[1])
    both = [x.masked_fill(~expected.isfinite(), 0) for x in (out, expected)]
    assert_accurate(*both, precision)


# ------------------------------------------------------------------- QA-09: the end of FP16's range
def keys_near_the_end(q, k, v):
    return q * 3e-4, (4e4 + 3e3 * k).clamp(-6e4, 6e4), v


def queries_near_the_end(q, k, v):
    return (2e4 * q).clamp(-6e4, 6e4), k * 5e-5, v


def both_near_the_end(q, k, v):
    return (2e4 * q).clamp(-6e4, 6e4), (1e4 * k).clamp(-6e4, 6e4), v


def in_fp16(change):
    # The reports had 33,000 tokens; sums of 1,024 overflow FP16 as well.
    tensors_fp32 = tensors(b=2, nq=140, nk=1024, dtype=torch.float32)
    return [x.half() for x in change(*tensors_fp32)]


@each_precision
@pytest.mark.parametrize("change", [keys_near_the_end, queries_near_the_end])
def test_queries_and_keys_near_the_end_of_fp16_lose_no_accuracy(precision, change):
    """QA-09: means, maxima and scales in FP16 overflow to black pictures."""
    q, k, v = in_fp16(change)
    big = max(q, k, key=lambda x: x.abs().max())
    assert big.abs().max() == 6e4
    assert big[:, :, :128].cumsum(2, dtype=torch.float16).isinf().any()
    assert_accurate(attention(q, k, v, precision=precision), exact(q, k, v), precision)


@each_precision
def test_products_far_beyond_fp16_stay_finite_and_within_the_values(precision):
    """QA-09: q and k both near 6e4 leave a one-hot softmax, never NaN."""
    q, k, v = in_fp16(both_near_the_end)
    assert exact(q, k, v).isfinite().all()
    out = attention(q, k, v, precision=precision)
    assert out.isfinite().all()
    # A mean of values lies among them; quantised to E2M1, they move by a sixth of the largest.
    assert (out.abs() <= v.abs().amax(2, keepdim=True) * 7 / 6).all()


def of_size(power, tokens, channels, alike):
    """[1, 1, tokens, channels], BF16: numbers of size 2^power, all alike or of random sign."""
    signs = torch.ones if alike else lambda *shape: torch.randn(*shape).sign()
    return (signs(1, 1, tokens, channels) * 2.0**power).bfloat16()


@each_precision
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("powers", [(120, -120), (-120, 120), (120, -9), (-9, 120), (120, -130)])
@pytest.mark.parametrize("channels", [64, 256])
def test_bf16_inputs_up_to_the_documented_size_give_finite_outputs(
    precision, powers, channels, alike
):
    """docs/numerics.md, what holds for any input: sums over blocks and channels stay in FP32."""
    torch.manual_seed(0)
    q, k, v = (of_size(power, 200, channels, alike) for power in (*powers, 120))
    in_fp32 = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    assert in_fp32.isfinite().all()
    assert attention(q, k, v, precision=precision).isfinite().all()


# ------------------------------------------------------------------------------ QA-10: one sink key
@pytest.fixture(scope="module")
def sink():
    """Calls (q, k, v) without a sink, and with key 0 x25, its value x0.02; its weight in each row.

    The base is peaky, keys of N(0, 2), as where the bars come from: the sink limits V's scale per
    channel, and an INT8 error of .07 here is .10 where softmax is nearly flat.
    """
    q, k, v = tensors(hq=8, nk=1024, d=128)
    loud, quiet = k.clone(), v.clone()
    loud[:, :, 0] *= 25
    quiet[:, :, 0] *= 0.02
    weights = (q.double() @ loud.double().mT * q.shape[-1] ** -0.5).softmax(-1)
    return (q, k, v), (q, loud, quiet), weights[..., 0]


@each_precision
def test_one_dominating_key_leaves_the_whole_within_its_bars(precision, sink):
    """QA-10: an attention sink takes half of the rows and gives them next to nothing."""
    _, call, weight = sink
    assert 0.3 < (weight > 0.99).double().mean() < 0.7
    errors = compare(attention(*call, precision=precision), exact(*call))
    assert errors.finite
    if precision == "int8":
        assert errors.rel_l1 < 0.08
    else:
        assert errors.cosine > 0.92


def row_errors(call, precision):
    expected = exact(*call)
    difference = attention(*call, precision=precision).double() - expected
    return difference.abs().sum(-1) / expected.abs().sum(-1)


@each_precision
def test_rows_that_do_not_look_at_the_dominating_key_keep_their_accuracy(precision, sink):
    """QA-10: a sink must not share its scale with all the rest; a mean over rows would hide that.

    A few rows may suffer: those that look at a key in the sink's own group of scales.
    """
    plain, call, weight = sink
    elsewhere = weight < 0.01
    errors, without = (row_errors(c, precision)[elsewhere] for c in (call, plain))
    worst, growth = {"fp4": (1.5, 1.15), "int8_fp4": (1.0, 1.15), "int8": (1.0, 2.5)}[precision]
    assert errors.max() < worst
    assert errors.quantile(0.95) < growth * without.quantile(0.95)


# Not in fp4: there the sink's own score, of about 50, is off by more than its lead in some rows.
@pytest.mark.parametrize("precision", ["int8_fp4", "int8"])
def test_rows_that_look_only_at_the_dominating_key_are_off_by_a_step_of_v_at_most(precision, sink):
    """QA-10: relative to the little that such rows hold the error is large, to a picture small."""
    _, call, weight = sink
    q, k, v = call
    error = (attention(q, k, v, precision=precision).double() - exact(q, k, v)).abs()
    step = v.double().abs().amax(2, keepdim=True) * STEP[precision]
    assert (error <= step)[weight > 0.999].all()
