"""The solver's choice is the fastest within the budget, as trying all choices shows."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sageattention3.kernels import PRECISIONS
from sageattention3.nodes.engine.advice import describe_profile, explain_choice
from sageattention3.nodes.engine.budget import Choice, choose, keep_worst
from sageattention3.nodes.engine.forecast import MARGIN, contributions
from sageattention3.nodes.engine.profile import ProfileError

from .profiles import NAN, profile_of

QUANTISED = [p for p in PRECISIONS if p != "fp16"]
LAYERS = ["double.0", "double.1", "single.0", "single.1"]
EIGHT = tuple(1 - i / 8 for i in range(9))


@st.composite
def problems(draw):
    """(profile of at most 4 layers and 8 steps, max_error)"""
    layers = LAYERS[: draw(st.integers(1, 4))]
    steps = draw(st.sampled_from([1, 4, 8]))
    errors = st.floats(0, 1, width=32)
    times = st.floats(0.125, 4, width=32)
    found = {
        p: {layer: draw(st.lists(errors, min_size=steps, max_size=steps)) for layer in layers}
        for p in QUANTISED
    }
    seconds = {p: {layer: draw(times) for layer in layers} for p in PRECISIONS}
    sigmas = tuple(1 - i / steps for i in range(steps + 1))
    moved = {layer: draw(st.floats(0.0625, 2, width=32)) for layer in layers}
    profile = profile_of(found, moved=moved, seconds=seconds, sigmas=sigmas)
    return profile, draw(st.floats(0, 2))


def by_trying_all(profile, max_error):
    """The least time of all choices with a forecast within max_error, by definition."""
    added = {p: contributions(profile, p) for p in PRECISIONS}
    seconds = {p: profile.seconds[p].tolist() for p in PRECISIONS}
    steps, best = profile.steps, math.inf
    edges = range(min(3, steps // 4) + 1)
    for chosen in itertools.product(PRECISIONS, repeat=len(profile.layers)):
        for first, last in itertools.product(edges, edges):
            window = range(first, steps - last)
            squares = [sum(added[p][i][s] for s in window) ** 2 for i, p in enumerate(chosen)]
            if math.sqrt(sum(squares)) <= max_error:
                inside = sum(seconds[p][i] for i, p in enumerate(chosen)) * len(window)
                best = min(best, inside + sum(seconds["fp16"]) * (first + last))
    return best


@settings(max_examples=60)
@given(problems())
def test_the_choice_is_the_fastest_of_all_within_the_budget(problem):
    profile, max_error = problem
    choice = choose(profile, max_error)
    # The solver's tolerance: a budget is met to six digits.
    assert choice.error <= max_error * (1 + 1e-5)
    assert choice.seconds <= by_trying_all(profile, max_error) * (1 + 2e-4)  # and its own gap
    assert choice.seconds == pytest.approx(time_of(profile, choice))


def time_of(profile, choice):
    rows = list(enumerate(choice.precisions.values()))
    chosen = sum(profile.seconds[p][i].item() for i, p in rows)
    host = profile.seconds["fp16"].sum().item()
    edges = choice.first + choice.last
    return chosen * (profile.steps - edges) + host * edges


@settings(max_examples=40)
@given(problems(), st.integers(0, 4), st.sampled_from(QUANTISED))
def test_keeping_k_layers_keeps_those_without_which_the_forecast_is_smallest(problem, k, precision):
    profile, _ = problem
    k = min(k, len(profile.layers))
    kept = keep_worst(profile, precision, k)
    assert len(kept.layers_in("fp16")) == k
    squares = contributions(profile, precision).sum(1) ** 2
    rest = itertools.combinations(squares, len(squares) - k)
    assert kept.error == pytest.approx(math.sqrt(min(sum(some) for some in rest)), abs=1e-9)


def test_no_budget_means_fp16_and_a_large_one_the_fastest():
    errors = {p: {"double.0": 0.1, "double.1": 0.2} for p in QUANTISED}
    assert set(choose(profile_of(errors), 0.0).precisions.values()) == {"fp16"}
    assert set(choose(profile_of(errors), 9.0).precisions.values()) == {"fp4"}


def test_the_layer_that_loses_most_is_the_one_that_stays():
    profile = profile_of({"fp4": {"double.0": 0.1, "double.1": 0.9, "single.0": 0.1}})
    assert choose(profile, 0.2).layers_in("fp16") == ["double.1"]


def test_a_precision_that_is_slower_here_is_not_chosen():
    seconds = {"fp16": {"double.0": 1.0}, "int8": {"double.0": 1.5}}
    profile = profile_of({"int8": {"double.0": 0.01}}, seconds=seconds)
    assert choose(profile, 1.0).precisions == {"double.0": "fp16"}


def test_layers_and_precisions_that_are_ruled_out_are_not_chosen():
    profile = profile_of({p: {"double.0": 0.1, "double.1": 0.1} for p in QUANTISED})
    choice = choose(profile, 1.0, ("int8",), {"double.1"})
    assert choice.precisions == {"double.0": "int8", "double.1": "fp16"}


@pytest.mark.parametrize("error", [NAN, math.inf])
def test_a_layer_that_was_not_measured_or_gave_no_number_stays_in_fp16(error):
    profile = profile_of({"fp4": {"double.0": error, "double.1": 0.1}})
    assert choose(profile, 100.0).precisions == {"double.0": "fp16", "double.1": "fp4"}


def test_the_worst_steps_at_the_ends_stay_in_fp16_where_that_pays():
    early = [5.0, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01]
    profile = profile_of({"fp4": dict.fromkeys(LAYERS, early)}, sigmas=EIGHT)
    choice = choose(profile, 0.2)
    assert (choice.first, choice.last) == (1, 0)
    assert choice.layers_in("fp4") == LAYERS
    # Halfway between the first and the second step; the steps' starts are 0, 1/8, 2/8 ...
    assert (choice.start_percent, choice.end_percent) == (1 / 16, 1.0)


def test_a_forecast_is_the_sum_over_steps_and_the_root_of_squares_over_layers():
    sigmas = (1.0, 0.5, 0.1, 0.0)
    profile = profile_of({"fp4": {"a": [0.1, 0.2, 0.4], "b": 0.1}}, sigmas=sigmas, moved=2.0)
    a = 0.5 * 0.1 + 0.8 * 0.2 + 1.0 * 0.4
    b = (0.5 + 0.8 + 1.0) * 0.1
    everywhere = keep_worst(profile, "fp4", 0)
    assert everywhere.error == pytest.approx(MARGIN * 2.0 * math.hypot(a, b), rel=1e-5)


def test_what_was_not_measured_is_read_off_what_was():
    gaps = {"fp4": {"a": [0.1, NAN, 0.3, NAN], "b": [0.2] * 4}}
    full = {"fp4": {"a": [0.1, 0.2, 0.3, 0.3], "b": [0.2] * 4}}
    # Four groups' worth of falling influence, each asked about at two steps.
    falling = [8.0, 4.0, 2.0, 1.0]
    moved = {"a": [8.0, NAN, 2.0, NAN], "b": [NAN, 12.0, NAN, 3.0]}
    true = {"a": falling, "b": [3 * x for x in falling]}
    sigmas = (1.0, 0.7, 0.4, 0.2, 0.0)
    found = contributions(profile_of(gaps, sigmas=sigmas, moved=moved), "fp4")
    assert found == pytest.approx(
        contributions(profile_of(full, sigmas=sigmas, moved=true), "fp4"), rel=0.05
    )


def test_layers_whose_influence_is_unknown_count_as_the_most_influential():
    profile = profile_of({"fp4": {"a": 0.1, "b": 0.1}}, moved={"a": 3.0})
    a, b = contributions(profile, "fp4")
    assert a == pytest.approx(b)


def test_a_calibration_that_never_asked_the_model_is_no_base_for_a_budget():
    with pytest.raises(ProfileError, match="calibrate with more steps"):
        choose(profile_of({"fp4": {"a": 0.1}}, moved={}), 0.1)


def test_the_choice_explains_itself_in_a_sentence():
    profile = profile_of({"fp4": {"double.0": 0.1, "double.1": 0.9, "double.2": 0.1}})
    assert explain_choice(choose(profile, 0.2), profile, 0.2) == (
        "Fastest within max_error 0.2: 2 layers in fp4 (double.0, double.2), 1 layer in fp16 "
        "(double.1); forecast error 0.17, attention takes 50% of its time in fp16 (assumed, not "
        "timed)"
    )
    edges = Choice({"double.0": "int8"}, 1, 2, 0.1, 0.9, 0.01, 1.0, 2.0, timed=True)
    text = explain_choice(edges, profile, 0.2)
    assert ", the first 1 step and the last 2 steps all in fp16; " in text
    assert text.endswith("(measured on CPU)")


def test_the_report_names_the_worst_layers_and_what_keeping_them_does():
    outliers = {"double.0": 2.0, "double.1": 30.0, "double.2": 3.0}
    errors = {"fp4": {"double.0": 0.1, "double.1": 0.9, "double.2": 0.1}}
    profile = profile_of(errors, outliers=outliers)
    text = describe_profile(profile, choose(profile, 0.2), 0.2)
    assert "1 layer kept in fp16: 0.17  (fp16_layers: double.1)" in text
    assert "Hardest to quantise by their inputs alone: double.1, double.2, double.0" in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith("double.")] == [
        "double.1",
        "double.0",
        "double.2",
    ]
