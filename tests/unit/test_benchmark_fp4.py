"""What the FP4 benchmarks compute, and what docs/fp4.md quotes of their results."""

import json
import re

import pytest
import torch
from sageattention3.benchmarks import accumulation, fp4_accuracy, fp4_speed_model
from sageattention3.demo.pack import ROOT
from sageattention3.kernels.reference import exact_attention, formats

RESULTS = ROOT / "benchmarks" / "results"
DOC = (ROOT / "docs" / "fp4.md").read_text("utf-8")


@pytest.fixture(scope="module")
def accuracy():
    return json.loads((RESULTS / "accuracy_fp4.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def loops():
    return json.loads((RESULTS / "fp4_speed_model.json").read_text("utf-8"))["loops"]


def test_the_model_gives_the_reference_implementation_its_published_speed():
    [(name, published)] = fp4_speed_model.PUBLISHED.items()
    bounds = fp4_speed_model.PEERS[name].bounds()
    assert abs(bounds["serial"] / published - 1) < 0.02


def test_no_bound_is_above_the_tensor_cores_peak():
    full = fp4_speed_model.Loop(head_dim=128, slots=0, tensor=64, mufu=0)
    assert full.bounds()["overlapped"] == pytest.approx(1676, abs=1)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_the_slots_and_tops_in_the_docs_are_those_of_the_result(loops, head_dim):
    [row] = re.findall(rf"^\| {head_dim} \|.*", DOC, re.MULTILINE)
    plain, smooth = loops[f"{head_dim} channels"], loops[f"{head_dim} channels, Q smoothed"]
    masked = loops[f"{head_dim} channels, Q smoothed, masked"]
    wanted = [head_dim, plain["slots"], smooth["slots"], masked["slots"], plain["tensor"]]
    assert [int(x) for x in re.findall(r"\d+", row)] == [
        *wanted,
        plain["overlapped"],
        plain["serial"],
    ]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_the_slots_of_int8_fp4_in_the_docs_are_those_of_the_result(loops, head_dim):
    [row] = re.findall(rf"^\| `int8_fp4`, ({head_dim} \|.*)", DOC, re.MULTILINE)
    plain, masked = (loops[f"int8_fp4, {head_dim} channels{x}"] for x in ("", ", masked"))
    wanted = [head_dim, plain["slots"], masked["slots"], plain["tensor"]]
    assert [int(x) for x in re.findall(r"\d+", row)] == [
        *wanted,
        plain["overlapped"],
        plain["serial"],
    ]


@pytest.mark.parametrize("name", ["fp4", "int8_fp4"])
def test_the_kernels_reach_the_accuracy_that_was_asked_of_them(accuracy, name):
    schemes = accuracy["tables"]["Schemes"]
    bar = {"fp4": 0.135, "int8_fp4": 0.105}[name]
    assert schemes[f"{name}, the kernels' model"]["rel_l1"] <= bar


@pytest.mark.parametrize(
    ("label", "table", "rows"),
    [
        ("SageAttention3 as published", "Schemes", ["paper"]),
        ("`fp4`, the kernels' model", "Schemes", ["fp4, the kernels' model"]),
        (
            "one mean per head",
            "Queries per mean",
            ["no smoothing of Q", "all of a head", "128", "64"],
        ),
        (
            "amax / 6 only",
            "Targets of the search for scales",
            ["6", "6, 4", "6, 5, 4.5, 4", "6, 5.5, 5, 4.75, 4.5, 4.25, 4, 7"],
        ),
        ("V not smoothed", "One thing changed", ["V not smoothed"]),
        ("denominator", "One thing changed", ["sum of P before quantising"]),
        (
            "neither balanced",
            "One thing changed",
            ["neither balanced nor rotated", "rotated alone", "balanced alone"],
        ),
        (
            "the largest value, not",
            "One thing changed",
            ["balanced by the largest value", "channels sorted instead"],
        ),
        ("`int8_fp4`, the kernels' model", "Schemes", ["int8_fp4, the kernels' model"]),
    ],
)
def test_the_errors_in_the_docs_are_those_of_the_result(accuracy, label, table, rows):
    [cell] = re.findall(rf"^\|[^|]*{re.escape(label)}[^|]*\| ([^|]*) \|", DOC, re.MULTILINE)
    right = [accuracy["tables"][table][row]["rel_l1"] for row in rows]
    assert [float(x) for x in cell.split(" / ")] == pytest.approx(right, abs=5.1e-4)


def test_the_kernels_are_nowhere_worse_than_the_published_scheme(accuracy):
    for title, rows in accuracy["tables"].items():
        if title.startswith("Synthetic"):
            model, paper = rows["fp4, the kernels' model"], rows["paper"]
            assert model["rel_l1"] <= paper["rel_l1"], title


def test_the_error_has_no_peak_at_the_length_of_a_block(accuracy):
    before, period, after = accuracy["autocorrelation of the error along queries, by lag"].values()
    assert period <= max(before, after)


def test_rewritten_operands_leave_exact_attention_as_it_is():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 50, 16, generator=generator) for h in (4, 2, 2))
    right = exact_attention(q, k, v)
    for rewrite in (fp4_accuracy.balanced_by_largest, fp4_accuracy.sorted_channels):
        assert torch.allclose(exact_attention(*rewrite(q, k), v), right, atol=1e-5)


def test_search_targets_are_put_back():
    saved = formats.SEARCH_TARGETS
    with fp4_accuracy.search_targets((6.0,)):
        assert formats.SEARCH_TARGETS == (6.0,)
    assert saved == formats.SEARCH_TARGETS


@pytest.mark.parametrize(
    ("label", "row"),
    [
        ("SageAttention3 as published", "SageAttention3 as published"),
        ("`fp4`", "fp4"),
        ("`fp4`, three blocks in FP16", "fp4, three blocks in FP16"),
        ("`int8_fp4`", "int8_fp4"),
        ("`int8`", "int8"),
    ],
)
def test_the_growth_of_errors_in_the_docs_is_that_of_the_result(label, row):
    result = json.loads((RESULTS / "accumulation.json").read_text("utf-8"))
    text = (ROOT / "docs" / "numerics.md").read_text("utf-8").split("## From layer to layer")[1]
    [cells] = re.findall(rf"^\| {re.escape(label)} \| ([.0-9| ]*) \|$", text, re.MULTILINE)
    states = result["relative L1 difference after each block"][row]
    right = [states[block - 1] for block in accumulation.SHOWN]
    assert [float(x) for x in cells.split(" | ")] == pytest.approx(right, abs=5.1e-5)
    assert result["kept in FP16"] == [1, 2, 18]
