"""What benchmarks/attention.py computes without a GPU, and what documents quote of its result."""

import json
import re

import pytest
from sageattention3.benchmarks.attention import SHAPES, Shape, plot
from sageattention3.demo.pack import ROOT

RESULT = ROOT / "benchmarks" / "results" / "attention_h200.json"


@pytest.fixture(scope="module")
def result():
    return json.loads(RESULT.read_text("utf-8"))


def test_operations_are_those_of_two_products_and_half_of_them_if_causal():
    shape = Shape("", 2, 3, 100, 64)
    assert shape.flops == 2 * (2 * 2 * 3 * 100 * 100 * 64)
    assert shape._replace(causal=True).flops == shape.flops / 2


def test_the_committed_result_says_where_it_comes_from_and_has_every_shape(result):
    assert [call["name"] for call in result["calls"]] == [shape.name for shape in SHAPES]
    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"])
    assert {"machine", "torch", "cuda", "date"} <= set(result)


MODELS = ["HunyuanVideo", "Wan 2.1 14B", "Flux", "SDXL"]


def ratios_of(result, model):
    """As documents write them: the kernel of all GPUs over torch's FlashAttention-2, and what the
    pack picks on that GPU over it and over cuDNN."""
    [call] = [call for call in result["calls"] if call["name"] == model]
    taken = call["milliseconds"]
    everywhere = taken["int8 (sm80_int8)"]
    here = taken["int8 (sm90_int8)"] if call["head_dim"] <= 128 else everywhere
    pairs = (("torch flash", everywhere), ("torch flash", here), ("torch cuDNN", here))
    return [f"{taken[name] / ours:.2f}" for name, ours in pairs]


@pytest.mark.parametrize("model", MODELS)
def test_the_ratios_in_the_table_are_those_of_the_result(result, model):
    table = (ROOT / "docs" / "gpus.md").read_text("utf-8")
    [row] = re.findall(rf"\| {re.escape(model)}, .*", table)
    assert re.findall(r"([\d.]+)x", row) == ratios_of(result, model)


def test_the_readme_quotes_the_least_and_the_most_of_the_table(result):
    quoted = re.search(
        r"measured ([\d.]+) to ([\d.]+) times", (ROOT / "README.md").read_text("utf-8")
    )
    over_flash = sorted(ratios_of(result, model)[0] for model in MODELS)
    assert quoted.groups() == (over_flash[0], over_flash[-1])


def test_a_plot_has_a_bar_for_whatever_took_part(result, tmp_path):
    del result["calls"][0]["milliseconds"]["torch cuDNN"]  # took no part in one shape
    plot(result["calls"], tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
