"""What benchmarks/training.py computes without a GPU, and what documents quote of its result."""

import json
import re

import pytest
import torch
from rich.console import Console
from sageattention3.benchmarks.training import (
    FLOPS_OF_FORWARD,
    QUICK,
    SHAPES,
    cosines_against,
    gradients,
    show,
)
from sageattention3.demo.pack import ROOT
from sageattention3.kernels.reference import exact_attention

RESULT = ROOT / "benchmarks" / "results" / "training_h200.json"


@pytest.fixture(scope="module")
def result():
    return json.loads(RESULT.read_text("utf-8"))


def test_seven_products_take_three_and_a_half_times_those_of_two():
    assert FLOPS_OF_FORWARD == 7 / 2
    assert {shape.name for shape in QUICK} == {"4k, D128", "16k, D128", "16k, D64"}


def test_gradients_of_a_function_are_those_of_its_own_inputs():
    q, k, v, d_out = (torch.randn(1, 2, 9, 16, dtype=torch.float64) for _ in range(4))
    mine = gradients(exact_attention, q, k, v, d_out, False)
    assert [x.shape for x in mine] == [q.shape, k.shape, v.shape]
    assert cosines_against(mine, mine) == {"dQ": 1.0, "dK": 1.0, "dV": 1.0}


def test_the_committed_result_says_where_it_comes_from_and_has_every_shape(result):
    assert [call["name"] for call in result["calls"]] == [shape.name for shape in SHAPES]
    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"])
    assert {"machine", "torch", "cuda", "date"} <= set(result)


def test_a_table_shows_whoever_took_part(result):
    console = Console(record=True, width=100)
    del result["calls"][0]["milliseconds"]["torch cuDNN"]
    show(result["calls"], result["cosines"], console)
    assert "sm90_sagebwd" in console.export_text()


@pytest.mark.parametrize("name", ["16k, D128", "4k, D128", "16k, D64", "4k, D64"])
def test_the_ratios_in_the_table_are_those_of_the_result(result, name):
    [call] = [call for call in result["calls"] if call["name"] == name]
    taken = call["milliseconds"]
    ratios = [f"{taken[x] / taken['sm90_sagebwd']:.2f}" for x in ("torch flash", "torch cuDNN")]
    table = (ROOT / "docs" / "training.md").read_text("utf-8")
    [row] = re.findall(rf"^\| {re.escape(name)} .*", table, re.M)
    assert re.findall(r"([\d.]+)x", row) == ratios
