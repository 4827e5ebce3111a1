"""The error metrics: they must see what cosine hides, and never divide by nothing."""

import math

import pytest
import torch
from sageattention3.kernels.metrics import compare


def test_equal_tensors_have_no_error():
    x = torch.randn(2, 3, 4)
    errors = compare(x, x)
    assert errors[1:] == (0.0, 0.0, 0.0, True)
    assert errors.cosine == pytest.approx(1.0)


def test_the_metrics_are_what_their_names_say():
    ref = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    out = torch.tensor([[3.0, 5.0], [1.0, 1.0]])
    errors = compare(out, ref)
    assert errors.cosine == pytest.approx(30 / math.sqrt(36 * 26))
    assert errors.rel_l1 == pytest.approx(2 / 8)
    assert errors.rmse == pytest.approx(math.sqrt(2 / 4))
    assert errors.worst_row_rel_l1 == pytest.approx(1.0)


def test_a_wrong_magnitude_shows_although_cosine_hides_it():
    x = torch.randn(100)
    errors = compare(1.2 * x, x)
    assert errors.cosine == pytest.approx(1.0)
    assert errors.rel_l1 == pytest.approx(0.2, rel=1e-5)


def test_zero_against_zero_is_no_error_and_zero_against_something_is():
    zero, one = torch.zeros(3, 4), torch.ones(3, 4)
    assert compare(zero, zero) == (1.0, 0.0, 0.0, 0.0, True)
    assert compare(zero, one).rel_l1 == 1.0
    assert compare(zero, one).cosine == 0.0
    assert compare(one, zero).rel_l1 == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_reported(bad):
    out = torch.ones(4)
    out[2] = bad
    assert not compare(out, torch.ones(4)).finite


def test_small_differences_of_16_bit_tensors_are_not_rounded_away():
    ref = torch.full((1000,), 1.0, dtype=torch.float64)
    out = (ref + 2.0**-10).half()
    assert compare(out, ref).rel_l1 == pytest.approx(2.0**-10)


def test_shapes_must_agree_exactly():
    with pytest.raises(ValueError, match="cannot compare"):
        compare(torch.ones(3, 1), torch.ones(3))
    with pytest.raises(ValueError, match="cannot compare"):
        compare(torch.ones(0), torch.ones(0))
