"""Draws the help pages' pictures: ``.venv/bin/python demo pictures`` after a change of a chart."""

from pathlib import Path

import torch
from PIL import Image

from . import host, tiny
from .pack import ROOT
from .sampling import patched, sample

DOCS = ROOT / "web" / "docs"


def main() -> int:
    host.import_comfy()
    for draw in (comparison,):
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


def _save(chart: torch.Tensor, node: str, name: str) -> Path:
    path = Path(node, name)
    pixels = (chart[0] * 255).round().byte().numpy()
    Image.fromarray(pixels).save(DOCS / path, quality=85, optimize=True)
    return path
