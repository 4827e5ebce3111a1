"""What the benchmark node makes of times: the advice, the table, the bars."""

import json

import pytest
import torch
from sageattention3.demo.pack import ROOT
from sageattention3.kernels import Capability
from sageattention3.kernels.shapes import IMAGE_MODELS, VIDEO_MODELS, Shape
from sageattention3.kernels.timing import Race
from sageattention3.nodes.engine.charts import COLOURS
from sageattention3.nodes.engine.plan import PRESETS
from sageattention3.nodes.engine.speed import (
    JUDGED,
    MENU,
    Speed,
    advise,
    measure_shape,
    native_precisions,
    speed_table,
    why_nothing_native,
)
from sageattention3.nodes.engine.speed_chart import speed_chart

SDXL, FLUX = IMAGE_MODELS


def speed(shape, refused=None, **milliseconds):
    return Speed(shape, Race(milliseconds, refused or {}))


# --- advice --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "precisions", "words"),
    [
        ([speed(FLUX, fp16=2.0, int8=1.0)], ["int8"], "Use preset balanced here: int8 computes"),
        ([speed(FLUX, fp16=2.0, int8=1.0)], ["int8"], "(Flux 2.00x)."),
        ([speed(FLUX, fp16=2.0, int8=1.0, fp4=0.5)], ["int8", "fp4"], "Use preset speed here: fp4"),
        # preset speed would compute in fp4 all the same, so it is not the faster one
        ([speed(FLUX, fp16=2.0, int8=1.0, fp4=1.5)], ["int8", "fp4"], "Use preset balanced"),
        ([speed(FLUX, fp16=2.0, int8=1.0, fp4=0.98)], ["int8", "fp4"], "Use preset balanced"),
        ([speed(FLUX, fp16=2.0, int8=2.5, fp4=1.0)], ["int8", "fp4"], "Use preset speed"),
        ([speed(FLUX, fp16=1.0, int8=1.0)], ["int8"], "Leave SageAttention3 off for speed"),
        ([speed(FLUX, fp16=1.04, int8=1.0)], ["int8"], "Leave SageAttention3 off for speed"),
        ([speed(FLUX, fp16=1.06, int8=1.0)], ["int8"], "Use preset balanced"),
        ([speed(FLUX, {"fp16": "no memory"}, int8=1.0)], ["int8"], "Nothing could be compared"),
    ],
)
def test_the_advice_follows_from_the_times(speeds, precisions, words):
    assert words in advise(speeds, precisions)


def test_models_that_would_be_slower_are_named():
    speeds = [speed(SDXL, fp16=0.8, int8=1.0), speed(FLUX, fp16=1.5, int8=1.0)]
    told = advise(speeds, ["int8"])
    assert told.endswith("(Flux 1.50x); leave it off for SDXL 0.80x.")


@pytest.mark.parametrize(
    ("host", "backend", "slow"),
    [("torch flash", "sm80_int8", []), ("torch cuDNN", "sm90_int8", ["SDXL", "Flux"])],
)
def test_the_advice_on_the_committed_times_is_what_the_readme_says_of_them(host, backend, slow):
    """On an H200, INT8 gains over FlashAttention-2 everywhere; over cuDNN in videos, not images."""
    path = ROOT / "benchmarks" / "results" / "attention_h200.json"
    taken = {call["name"]: call["milliseconds"] for call in json.loads(path.read_text())["calls"]}
    speeds = [
        speed(shape, fp16=taken[shape.name][host], int8=taken[shape.name][f"int8 ({backend})"])
        for shape in MENU["all"]
    ]
    fast, _, left_off = advise(speeds, ["int8"]).partition("leave it off for ")
    assert fast.startswith("Use preset balanced")
    for shape in MENU["all"]:
        assert (f"{shape.name} " in left_off) == (shape.name in slow)
        assert (f"{shape.name} " in fast) == (shape.name not in slow)


def test_presets_are_judged_by_what_their_recipes_compute_in():
    assert set(JUDGED) <= set(PRESETS)
    assert set(PRESETS) - set(JUDGED) == {"quality"}
    assert PRESETS["quality"].precisions == PRESETS["balanced"].precisions


# --- what there is to measure --------------------------------------------------------------------

ROWS = [
    Capability("int8", "sm80_int8", True, True, ""),
    Capability("fp4", "sm120_fp4", True, False, "needs compute capability 12.x"),
    Capability("fp4", "emulated", False, True, ""),
]


def test_only_native_backends_that_work_here_are_timed():
    assert native_precisions(ROWS) == ["int8"]
    assert native_precisions(ROWS[1:]) == []
    assert why_nothing_native(ROWS[1:]) == "needs compute capability 12.x"
    assert why_nothing_native(ROWS[2:]) == "this version has no native kernels"


def test_the_menu_offers_groups_and_single_models():
    assert MENU["all"] == (*IMAGE_MODELS, *VIDEO_MODELS)
    assert [shape.name for shape in MENU["Flux"]] == ["Flux"]


def test_host_and_precisions_get_the_same_tensors_and_take_turns():
    shape = Shape("tiny", 1, 2, 16, 64)
    qkv = [torch.randn(1, 2, 16, 64) for _ in range(3)]
    seen = []

    def host(q, k, v):
        seen.append((q, k, v))
        return q

    results = []

    def timer(call, times):
        results.append(call())
        return [1.0] * times

    found = measure_shape(shape, qkv, ["int8"], host, timer, rounds=1)
    assert found.race.milliseconds == {"fp16": 1.0, "int8": 1.0}
    assert all(given is own for given, own in zip(seen[0], qkv, strict=True))
    assert any(out.shape == (1, 2, 16, 64) and out is not qkv[0] for out in results)


# --- table and bars ------------------------------------------------------------------------------


def test_the_table_is_aligned_and_tells_who_did_not_run():
    speeds = [
        speed(SDXL, fp16=0.305, int8=0.2329),
        speed(VIDEO_MODELS[2], {"fp4": "out of memory"}, fp16=473.52, int8=287.2),
    ]
    lines = speed_table(speeds, ["int8", "fp4"]).splitlines()
    assert len({len(line) for line in lines[1:4]}) == 1
    assert "0.305" in lines[2]
    assert "0.233 (1.31x)" in lines[2]
    assert "118,800" in lines[3]
    assert "287 (1.65x)" in lines[3]
    assert lines[4] == "HunyuanVideo, fp4: out of memory"


def rgb(colour):
    return torch.tensor([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def height_of(chart, colour):
    """Largest run of ``colour`` in a column; the legend's patches are lower than any bar here."""
    exact = (chart[0] - rgb(colour)).abs().amax(-1) < 1 / 512
    return exact.sum(0).max().item()


def test_bars_are_as_high_as_the_gain():
    speeds = [speed(SDXL, fp16=2.0, int8=1.0, fp4=0.5)]
    chart = speed_chart(speeds, ["int8", "fp4"], "a GPU")
    assert chart.dtype == torch.float32
    ratio = height_of(chart, COLOURS["fp4"]) / height_of(chart, COLOURS["int8"])
    assert ratio == pytest.approx(2, rel=0.1)


def test_without_measurements_there_is_a_picture_without_bars():
    chart = speed_chart([], [], "a GPU")
    assert chart.shape[0] == 1
    assert height_of(chart, COLOURS["int8"]) == 0
