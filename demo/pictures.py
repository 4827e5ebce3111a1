"""Draws the help pages' pictures: ``.venv/bin/python demo pictures`` after a change of a chart."""

import json
import tempfile
from pathlib import Path

import torch
from PIL import Image

from . import host, tiny
from .families import FAMILIES
from .frontend import CROP_PAD, Sight, Visit, tour
from .graph import PATCH_NODE, shrink, to_prompt
from .pack import ROOT
from .planted import planted_flux
from .sampling import calibrated, patched, sample
from .server import Server

DOCS = ROOT / "web" / "docs"


def main() -> int:
    host.import_comfy()
    for draw in (comparison, benchmark, calibration, layers):
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


def layers() -> Path:
    """The Patch of a shipped graph after a run and two clicks on its layers."""
    family = FAMILIES["hunyuan_video"]
    tiny.checkpoint(family.name)
    path = ROOT / "workflows" / f"{family.workflow}.json"
    workflow = json.loads(path.read_text("utf-8"))
    with Server(host.HOST / "pictures.log") as server, tempfile.TemporaryDirectory() as folder:
        object_info = server.object_info()
        prompt = shrink(to_prompt(workflow, object_info), family, object_info, preset="quality")
        visit = Visit(
            workflow,
            prompt,
            clicks=[f'[data-layer="{layer}"]' for layer in ("double.1", "single.0")],
            done_png=Path(folder, "graph.png"),
        )
        [sight] = tour(server.url, [visit], crop=True)
        with Image.open(visit.done_png) as graph:
            box = _box_of(PATCH_NODE, sight, workflow, graph.width)
            picture = graph.convert("RGB").crop(box)
    return _write(picture, "SageAttention3Patch", "layers.jpg")


def _box_of(type_: str, sight: Sight, workflow: dict, width: int) -> tuple[int, ...]:
    """Where a node is in a screenshot cropped to the graph: left, top, right, bottom in pixels."""
    boxes = [node["bounds"] for node in sight.nodes]
    boxes += [group["bounding"] for group in workflow["groups"]]
    left, top = (min(box[i] for box in boxes) for i in (0, 1))
    right = max(box[0] + box[2] for box in boxes)
    scale = (width - 2 * CROP_PAD) / (right - left)
    [(x, y, w, h)] = [node["bounds"] for node in sight.nodes if node["type"] == type_]
    edges = (x - left, y - top, x + w - left, y + h - top)
    pad = (-CROP_PAD, -CROP_PAD, CROP_PAD, CROP_PAD)
    return tuple(
        round(edge * scale) + CROP_PAD + more for edge, more in zip(edges, pad, strict=True)
    )


def _save(chart: torch.Tensor, node: str, name: str) -> Path:
    pixels = (chart[0] * 255).round().byte().numpy()
    return _write(Image.fromarray(pixels), node, name)


def _write(picture: Image.Image, node: str, name: str) -> Path:
    path = Path(node, name)
    (DOCS / node).mkdir(exist_ok=True)
    picture.save(DOCS / path, quality=85, optimize=True)
    return path
