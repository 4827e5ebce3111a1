"""benchmarks/projection.py against figures worked out by hand."""

import pytest
from sageattention3.benchmarks.projection import int8_gain, project


def call(tokens, head_dim, flash, int8, causal=False):
    taken = {"torch flash": flash, "int8 (sm80_int8)": int8}
    return {"tokens": tokens, "head_dim": head_dim, "causal": causal, "milliseconds": taken}


CALLS = [
    call(4000, 128, 3.0, 2.0),
    call(16000, 128, 8.0, 4.0),
    call(100000, 128, 9.0, 3.0),
    call(16000, 64, 5.0, 4.0),
    call(16000, 128, 5.0, 1.0, causal=True),
]
LOOPS = {"128 channels, Q smoothed": {"serial": 1000}}
ROW = {
    "tokens": 16896,
    "head_dim": 128,
    "attention_flops": 165.2e12,
    "linear_flops": 165.2e12 * 2,
    "other_seconds": 0.5,
}


@pytest.mark.parametrize(
    ("tokens", "head_dim", "gain"),
    [(4096, 128, 1.5), (7999, 128, 1.5), (8001, 128, 2), (75600, 128, 3), (4096, 64, 1.25)],
)
def test_the_gain_is_that_of_the_call_nearest_in_length(tokens, head_dim, gain):
    assert int8_gain(CALLS, tokens, head_dim) == gain


def test_a_step_is_products_at_the_peak_and_the_rest_by_bandwidth():
    found = {(row["gpu"], row["precision"]): row for row in project(ROW, CALLS, LOOPS)}
    assert list(found) == [("RTX 4090", "int8"), ("RTX 5090", "int8"), ("RTX 5090", "fp4")]

    rest = 2 + 0.5 * 4.8 / 1.008
    ada = found["RTX 4090", "int8"]
    assert ada["host_seconds"] == pytest.approx(rest + 1)
    assert ada["seconds"] == pytest.approx(rest + 1 / 2)
    assert ada["speedup"] == pytest.approx((rest + 1) / (rest + 0.5))

    fp4 = found["RTX 5090", "fp4"]
    faster = 165.2 / 209.5
    rest = 2 * faster + 0.5 * 4.8 / 1.792
    assert fp4["host_seconds"] == pytest.approx(rest + faster)
    assert fp4["seconds"] == pytest.approx(rest + 0.1652)
