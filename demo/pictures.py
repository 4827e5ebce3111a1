"""Draws the help pages' pictures: ``.venv/bin/python demo pictures`` after a change of a chart."""

import json
from pathlib import Path

import torch
from PIL import Image

from . import host, tiny
from .pack import ROOT
from .planted import planted_flux
from .sampling import calibrated, patched, sample

DOCS = ROOT / "web" / "docs"


def main() -> int:
    host.import_comfy()
    for draw in (comparison, benchmark, calibration):
        path = DOCS / draw()
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


def comparison() -> Path:
    """A short clip of a tiny random model in FP4, beside the same in full precision."""
    from ..nodes.engine.comparison import compare_sequences, pair_up
    from ..nodes.engine.comparison_chart import comparison_chart

    family = "wan_t2v"
    model = tiny.model(family)
    clips = [
        sample(each, family, steps=4, latent=(16, 6, 24, 40))
        for each in (model, patched(model, precision="fp4"))
    ]
    pair = pair_up(*({"samples": clip} for clip in clips))
    chart = comparison_chart(pair, compare_sequences(pair))
    return _save(chart, "SageAttention3Compare", "comparison.jpg")


def calibration() -> Path:
    """A tiny random model, one layer of which is hard to quantise, within a tight budget."""
    from ..nodes.engine.budget import choose
    from ..nodes.engine.error_chart import error_chart

    profile, _ = calibrated(planted_flux("double.1"), "flux", steps=8)
    chart = error_chart(profile, choose(profile, 0.004))
    return _save(chart, "SageAttention3Calibrate", "chart.jpg")


def benchmark() -> Path:
    """The committed figures of an H200, where torch is told to use its FlashAttention-2."""
    from ..kernels.timing import Race
    from ..nodes.engine.speed import HOST, MENU, Speed
    from ..nodes.engine.speed_chart import speed_chart

    text = (ROOT / "benchmarks" / "results" / "attention_h200.json").read_text("utf-8")
    record = json.loads(text)
    taken = {call["name"]: call["milliseconds"] for call in record["calls"]}
    names = {HOST: "torch flash", "int8": "int8 (sm80_int8)"}
    speeds = [
        Speed(shape, Race({ours: taken[shape.name][name] for ours, name in names.items()}, {}))
        for shape in MENU["all"]
    ]
    chart = speed_chart(speeds, ["int8"], f"{record['machine']}, against FlashAttention-2")
    return _save(chart, "SageAttention3Benchmark", "chart.jpg")


def _save(chart: torch.Tensor, node: str, name: str) -> Path:
    path = Path(node, name)
    (DOCS / node).mkdir(exist_ok=True)
    pixels = (chart[0] * 255).round().byte().numpy()
    Image.fromarray(pixels).save(DOCS / path, quality=85, optimize=True)
    return path
