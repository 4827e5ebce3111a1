"""A step is where the sigma lies in the schedule, however often the sampler calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sageattention3.nodes.engine.schedule import SigmaWindow, step_of

FALLING = [14.6, 7.0, 3.0, 1.0, 0.0]


def test_each_sigma_of_the_schedule_starts_its_step():
    assert [step_of(sigma, FALLING) for sigma in FALLING] == [0, 1, 2, 3, 3]


def test_second_evaluations_between_two_sigmas_belong_to_the_step_they_lie_in():
    assert step_of(9.0, FALLING) == 0
    assert step_of(2.9, FALLING) == 2
    assert step_of(1e-5, FALLING) == 3


def test_rounding_to_half_precision_does_not_move_a_call_to_its_neighbour():
    assert [step_of(sigma * (1 + 5e-5), FALLING) for sigma in FALLING[:-1]] == [0, 1, 2, 3]
    assert [step_of(sigma * (1 - 5e-5), FALLING) for sigma in FALLING[:-1]] == [0, 1, 2, 3]


def test_a_rising_schedule_counts_the_same_way():
    rising = FALLING[::-1]
    assert [step_of(sigma, rising) for sigma in (0.0, 1.0, 2.0, 7.0, 9.0)] == [0, 1, 1, 3, 3]


@pytest.mark.parametrize("sigma", [0.0, 5.0, 100.0])
def test_schedules_too_short_to_have_steps_give_step_zero(sigma):
    assert step_of(sigma, []) == 0
    assert step_of(sigma, [5.0]) == 0


@given(st.lists(st.floats(0, 1000), max_size=30), st.floats(0, 2000))
def test_the_step_is_always_one_of_the_schedule(schedule, sigma):
    assert 0 <= step_of(sigma, schedule) <= max(len(schedule) - 2, 0)


def test_a_window_holds_both_its_ends():
    window = SigmaWindow(first=7.0, last=1.0)
    assert [window.contains(sigma) for sigma in (7.1, 7.0, 3.0, 1.0, 0.9)] == [
        False,
        True,
        True,
        True,
        False,
    ]
