"""What benchmarks/training.py computes without a GPU."""

import torch
from rich.console import Console
from sageattention3.benchmarks.training import (
    BASELINE,
    FLOPS_OF_FORWARD,
    QUICK,
    cosines_against,
    gradients,
    show,
)
from sageattention3.kernels.reference import exact_attention


def test_seven_products_take_three_and_a_half_times_those_of_two():
    assert FLOPS_OF_FORWARD == 7 / 2
    assert {shape.name for shape in QUICK} == {"4k, D128", "16k, D128", "16k, D64"}


def test_gradients_of_a_function_are_those_of_its_own_inputs():
    q, k, v, d_out = (torch.randn(1, 2, 9, 16, dtype=torch.float64) for _ in range(4))
    mine = gradients(exact_attention, q, k, v, d_out, False)
    assert [x.shape for x in mine] == [q.shape, k.shape, v.shape]
    assert cosines_against(mine, mine) == {"dQ": 1.0, "dK": 1.0, "dV": 1.0}


def test_a_table_shows_whoever_took_part_in_a_call():
    calls = [
        {"name": "a", "flops": 2e12, "milliseconds": {BASELINE: 4.0, "sm90_sagebwd": 2.0}},
        {"name": "b", "flops": 2e12, "milliseconds": {BASELINE: 4.0}},
    ]
    console = Console(record=True, width=100)
    show(calls, {"sm90_sagebwd": {"dQ": [1.0, 0.998], "dK": [1.0], "dV": [1.0]}}, console)
    text = console.export_text()
    assert "1000  2.00x" in text
    assert "0.99900 (0.99800)" in text
