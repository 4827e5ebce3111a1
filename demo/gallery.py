"""The part of the demo that shows pictures: one clip after another, each in every precision.

Leaves ``clips.webp`` (all clips at once, moving), ``clips.png`` (stills and differences),
``layers.png`` (what each layer costs) and ``clips.json`` (the figures) in a folder.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.table import Table

from ..nodes.engine.budget import choose
from ..nodes.engine.comparison import Comparison, compare_sequences, pair_up
from ..nodes.engine.error_chart import error_chart
from ..nodes.engine.profile import Profile
from . import video
from .clip_sheet import save_animation, save_stills

PROMPTS = (
    "red star circling over blue stripes",
    "white seven left over green checks",
    "yellow moon spinning over purple dots",
)
CALIBRATED_ON = "green triangle right over purple checks"
STEPS = 8
STILLS = (0, 8)
MAX_ERROR = 0.02  # of the choice that the chart of layers marks

Report = Callable[[str], None]


def make(folder: Path, say: Report) -> Table:
    """Draws everything and returns the table of figures. say: told what is being made."""
    model = video.load_model()
    say("calibrating")
    profile = video.calibrate(model, CALIBRATED_ON, seed=100, steps=STEPS)
    plans = video.plans(model, profile)
    clips: dict[str, dict[str, torch.Tensor]] = {}
    figures: dict[str, dict[str, Comparison]] = {}
    for seed, prompt in enumerate(PROMPTS):
        made: dict[str, torch.Tensor] = {}
        for plan, patched in plans.items():
            say(f"{prompt}: {plan}")
            made[plan] = video.pictures(video.make_latent(patched, prompt, seed, STEPS))
        yardstick, *others = plans
        clips[prompt] = made
        figures[prompt] = {
            plan: compare_sequences(pair_up(made[yardstick], made[plan])) for plan in others
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_animation(folder / "clips.webp", clips, figures)
    save_stills(folder / "clips.png", clips, figures, STILLS)
    _save_layers(folder / "layers.png", profile)
    rows = {plan: _means(plan, figures) for plan in list(plans)[1:]}
    record = {"steps": STEPS, "prompts": list(PROMPTS), "plans": rows}
    (folder / "clips.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return _table(rows)


def _save_layers(path: Path, profile: Profile) -> None:
    chart = error_chart(profile, choose(profile, MAX_ERROR))[0]
    Image.fromarray((chart * 255).round().byte().numpy()).save(path, optimize=True)


def _means(plan: str, figures: dict[str, dict[str, Comparison]]) -> dict[str, Any]:
    found = [by_plan[plan] for by_plan in figures.values()]
    means = {
        "psnr": sum(each.overall_psnr for each in found) / len(found),
        "ssim": sum(each.overall_ssim for each in found) / len(found),
        "flicker": sum(each.motion.energy for each in found) / len(found),
    }
    return {name: float(f"{mean:.4g}") for name, mean in means.items()}


def _table(rows: dict[str, dict[str, float]]) -> Table:
    table = Table("clips in", "PSNR, dB", "SSIM", "flicker (1: none)")
    for plan, row in rows.items():
        table.add_row(plan, f"{row['psnr']:.1f}", f"{row['ssim']:.3f}", f"{row['flicker']:.3f}")
    return table
