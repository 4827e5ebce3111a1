"""benchmarks/kernel_times.py: what a profiler saw, by kernel. Timing itself needs a GPU."""

import io

from rich.console import Console
from sageattention3.benchmarks.kernel_times import SHAPES, median_microseconds, show


def test_runs_of_a_kernel_are_one_median_however_it_is_spelt():
    seen = [
        ("void sm80_int8_quantise<128, (Dtype)1, 128>(Params)", 60.0),
        ("sm90_int8_attention<128, 6>(Params)", 500.0),
        ("sm80_int8_quantise<128, 1, 128>", 64.0),
        ("sm90_int8_attention", 510.0),
        ("sm90_int8_attention<128, 6>", 900.0),
    ]
    found = median_microseconds(seen)
    assert found == {"sm80_int8_quantise": 62.0, "sm90_int8_attention": 510.0}
    assert list(found) == ["sm80_int8_quantise", "sm90_int8_attention"]


def test_speeds_are_those_of_attention_alone():
    shape = SHAPES[1]
    row = {
        **shape._asdict(),
        "flops": shape.flops,
        "backend": "sm90_int8",
        "microseconds": {"sm80_int8_quantise": 330.0, "sm90_int8_attention": 6597.0},
    }
    console = Console(file=io.StringIO(), width=120)
    show([row], console)
    lines = console.file.getvalue().splitlines()
    (quantise,) = (line for line in lines if "sm80_int8_quantise" in line)
    (attention,) = (line for line in lines if "sm90_int8_attention" in line)
    assert "330" in quantise
    assert "1000" in attention
    assert "1000" not in quantise
