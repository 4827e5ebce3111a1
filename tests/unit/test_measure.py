"""What a calibration reads from one call: rows, errors, predictors, noise, and its time."""

import math

import pytest
import torch
from sageattention3.kernels import attention
from sageattention3.kernels.metrics import compare
from sageattention3.nodes.engine.allowance import Allowance
from sageattention3.nodes.engine.call import read_call
from sageattention3.nodes.engine.measure import (
    BLOCK,
    BLOCKS,
    blur,
    errors_of,
    predictors_of,
    take_sample,
)


def call_of(tokens=1000, heads=2, batch=1, dim=64, mask=None, split=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, tokens, dim, generator=generator) for _ in range(3))
    call = read_call(q, k, v, heads, mask, skip_reshape=True, skip_output_reshape=split)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return call, out if split else out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("split", [True, False])
def test_the_host_rows_of_a_sample_are_those_of_its_queries(split):
    mask = torch.rand(1, 1, 1000, 1000, generator=torch.Generator().manual_seed(1)) > 0.3
    sample = take_sample(*call_of(mask=mask, split=split))
    assert sample.q.shape[2] == sample.out.shape[2] == BLOCKS * BLOCK
    again = torch.nn.functional.scaled_dot_product_attention(
        sample.q, sample.k, sample.v, attn_mask=sample.mask
    )
    assert torch.allclose(again, sample.out, atol=1e-6)


# FP4 has one scale for all queries of a head, which the rows alone set a little differently.
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp4", 0.02), ("int8_fp4", 1e-4), ("int8", 1e-4)]
)
def test_sampled_rows_have_the_errors_that_they_have_in_the_whole_call(precision, tolerance):
    call, out = call_of()
    whole = attention(call.q, call.k, call.v, precision=precision)
    sample = take_sample(call, out)
    rows = [int((call.q[0, 0] == q).all(-1).nonzero()) for q in sample.q[0, 0]]
    expected = compare(whole[:, :, rows], out[:, :, rows])
    found = errors_of(sample, precision, "reference")
    assert found.rel_l1 == pytest.approx(expected.rel_l1, rel=tolerance)


def test_a_short_call_is_measured_whole_and_a_large_batch_at_its_two_ends():
    call, out = call_of(tokens=200, batch=5)
    sample = take_sample(call, out)
    assert torch.equal(sample.q, call.q[[0, 4]])
    assert torch.equal(sample.out, out[[0, 4]])


def test_predictors_tell_outliers_a_common_key_and_a_sharp_softmax():
    call, out = call_of()
    plain = predictors_of(take_sample(call, out))
    assert plain.outlier_ratio < 1.5
    assert plain.mean_share < 0.01
    assert plain.entropy > 0.8

    call.k[:, 1, :, 7] *= 30
    assert predictors_of(take_sample(call, out)).outlier_ratio == pytest.approx(30, rel=0.2)
    call.k[:, 1, :, 7] /= 30
    call.k.add_(3.0)
    assert predictors_of(take_sample(call, out)).mean_share == pytest.approx(0.9, abs=0.02)
    call.k.sub_(3.0)
    call.q.mul_(20)
    assert predictors_of(take_sample(call, out)).entropy < 0.4


@pytest.mark.parametrize("additive", [False, True])
def test_the_entropy_counts_only_keys_that_are_seen(additive):
    seen = torch.zeros(1, 1, 1, 1000, dtype=torch.bool)
    seen[..., :10] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf) if additive else seen
    entropy = predictors_of(take_sample(*call_of(mask=mask))).entropy
    assert 0 < entropy <= math.log(10) / math.log(1000)


def test_noise_has_the_size_that_is_asked_for_and_is_the_same_each_time():
    _, out = call_of(split=False)
    noisy = blur(out, 0.1, "double.0")
    assert compare(noisy, out).rel_l1 == pytest.approx(0.1, rel=0.02)
    assert torch.equal(noisy, blur(out, 0.1, "double.0"))
    assert not torch.equal(noisy, blur(out, 0.1, "double.1"))


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def test_extra_work_never_exceeds_its_part_of_the_plain_work():
    clock = Clock()
    allowance = Allowance(2.5, clock)
    for _ in range(50):
        with allowance.plain_work():
            for _ in range(10):
                clock.time += 0.01
                if allowance.affords(0.04):
                    with allowance.extra_work():
                        clock.time += 0.04
    assert allowance.plain == pytest.approx(5.0)
    assert clock.time <= 2.5 * allowance.plain
    assert allowance.extra > 1.2 * allowance.plain, "the allowance is there to be used"
