"""docs/choosing-a-preset.md: the table of presets, and what it quotes of the benchmark."""

import json
import re

import pytest
from sageattention3.benchmarks.presets import MODELS, SEEDS, plans
from sageattention3.demo.pack import ROOT
from sageattention3.nodes.engine.plan import PRESETS

RESULTS = ROOT / "benchmarks" / "results"
RESULT = json.loads((RESULTS / "presets.json").read_text("utf-8"))
WAN, FLUX = (RESULT["models"][name] for name in ("wan_t2v", "flux"))
DOC = (ROOT / "docs" / "choosing-a-preset.md").read_text("utf-8")
TEXT = " ".join(DOC.split())


def rows_of(doc):
    return {
        cells[0].strip("` "): [cell.strip() for cell in cells[1:]]
        for line in doc.splitlines()
        if line.startswith("| ") and (cells := line.strip("| ").split(" | "))
    }


def quoted(value):
    return f"{value:.3g}".removeprefix("0")


def fall(rows, plan, start="fp4"):
    return f"{1 - rows[plan]['rel_l1'] / rows[start]['rel_l1']:.0%}".removesuffix("%")


def test_the_result_holds_every_plan_of_every_model():
    assert RESULT["seeds"] == len(SEEDS)
    for name in MODELS:
        assert list(RESULT["models"][name]) == list(plans(name))


def test_presets_were_measured_as_what_they_are_now():
    """The plan without a preset that says the same had the same error: neither changed since."""
    for rows in (WAN, FLUX):
        assert rows["preset balanced"] == rows["int8"]
        assert rows["preset quality"] == rows["int8, first and last block fp16"]
        assert (
            rows["preset speed"]["quantised"] < rows["fp4, first and last block fp16"]["quantised"]
        )


@pytest.mark.parametrize("plan", list(plans("wan_t2v")))
def test_the_errors_in_the_docs_are_those_of_the_result(plan):
    table = rows_of(DOC)
    name = plan.removeprefix("preset ")
    if name not in table:
        assert plan in ("int8", "int8, first and last block fp16"), "told as a preset"
        return
    numbers = [number.removesuffix(" |") for number in table[name] if number.strip("| ")]
    assert numbers == [quoted(rows[plan]["rel_l1"]) for rows in (WAN, FLUX) if plan in rows]


def test_the_table_of_presets_is_that_of_the_code():
    assert "| precision | INT8 | INT8 | FP4, else INT8 |" in DOC
    assert {name: recipe.precisions for name, recipe in PRESETS.items()} == {
        "balanced": ("int8",),
        "quality": ("int8",),
        "speed": ("fp4", "int8"),
    }
    assert "| first and last block | as the rest | FP16 | FP16 |" in DOC
    assert [recipe.edge_blocks for recipe in PRESETS.values()] == [0, 1, 1]
    assert "| first and last tenth of sampling | as the rest | as the rest | FP16 |" in DOC
    windows = [(recipe.start_percent, recipe.end_percent) for recipe in PRESETS.values()]
    assert windows == [(0, 1), (0, 1), (0.1, 0.9)]


def test_the_sentences_say_what_the_result_says():
    edges, middle = "fp4, first and last block fp16", "fp4, two middle blocks fp16"
    two, late = "fp4, two blocks at either end fp16", "fp4, last 20 % of sampling fp16"
    assert f"falls by {fall(WAN, edges)} and {fall(FLUX, edges)} %" in TEXT
    assert f"against {fall(WAN, middle)} and {fall(FLUX, middle)} %" in TEXT
    assert f"({fall(WAN, two)} and {fall(FLUX, two)} %)" in TEXT
    assert f"it falls by {fall(WAN, late)} and {fall(FLUX, late)} %" in TEXT
    for rows in (WAN, FLUX):
        assert rows["fp4"]["rel_l1"] / rows["int8"]["rel_l1"] == pytest.approx(13, abs=0.5)
        early = rows["fp4, first 20 % of sampling fp16"]["rel_l1"]
        assert abs(early / rows["fp4"]["rel_l1"] - 1) < 0.03
        assert rows["preset quality"]["rel_l1"] < rows["int8, two middle blocks fp16"]["rel_l1"]
    ratio = WAN["int8, cross-attention too"]["rel_l1"] / WAN["int8"]["rel_l1"]
    assert round(ratio) == 12


def test_the_time_on_the_cpu_is_that_of_the_h200():
    record = json.loads((RESULTS / "attention_h200.json").read_text("utf-8"))
    taken = record["enqueue_microseconds"]
    ours, torch_own = (round(taken[name]) for name in ("int8 (sm80_int8)", "torch"))
    assert re.search(rf"for {ours} us and torch's own for {torch_own} us", TEXT)
