"""The contact sheet of clips: a row per prompt, a column per plan, moving or as stills."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from ..nodes.engine.comparison import Comparison

CELL = 160  # pixels, both ways, of a frame as shown
GAP, HEAD, FOOT = 6, 22, 16
MILLISECONDS = 140  # a frame
LOUDER = 4  # times the difference, where stills show it
PAPER, INK, FAINT = "#ffffff", "#202020", "#707070"

Clips = Mapping[str, Mapping[str, torch.Tensor]]  # prompt -> plan -> [frames, height, width, 3]
Figures = Mapping[str, Mapping[str, Comparison]]  # prompt -> plan, where known


def save_animation(path: Path, clips: Clips, figures: Figures) -> None:
    """All clips at once as an animated WebP, each under its prompt and beside its fp16."""
    frames = len(_first(_first(clips)))
    sheets = [_sheet(clips, figures, frame) for frame in range(frames)]
    hold = [MILLISECONDS] * (frames - 1) + [4 * MILLISECONDS]
    sheets[0].save(
        path, save_all=True, append_images=sheets[1:], duration=hold, loop=0, quality=80, method=4
    )


def save_stills(path: Path, clips: Clips, figures: Figures, shown: Sequence[int]) -> None:
    """The frames ``shown``, one block of rows each, with the differences to fp16 below."""
    blocks = [
        _sheet(each, figures, frame) for frame in shown for each in (clips, _differences(clips))
    ]
    picture = Image.new("RGB", (blocks[0].width, sum(block.height for block in blocks)), PAPER)
    top = 0
    for block in blocks:
        picture.paste(block, (0, top))
        top += block.height
    picture.save(path, optimize=True)


def _sheet(clips: Clips, figures: Figures, frame: int) -> Image.Image:
    plans = list(_first(clips))
    width = GAP + len(plans) * (CELL + GAP)
    row = HEAD + CELL + FOOT
    picture = Image.new("RGB", (width, HEAD + len(clips) * row + GAP), PAPER)
    draw = ImageDraw.Draw(picture)
    font, small = ImageFont.load_default(13), ImageFont.load_default(11)
    for column, plan in enumerate(plans):
        draw.text((GAP + column * (CELL + GAP), 5), plan, INK, font)
    for number, (prompt, by_plan) in enumerate(clips.items()):
        top = HEAD + number * row
        draw.text((GAP, top + 5), prompt, FAINT, font)
        for column, (plan, clip) in enumerate(by_plan.items()):
            left = GAP + column * (CELL + GAP)
            picture.paste(_still(clip[frame]), (left, top + HEAD))
            found = figures.get(prompt, {}).get(plan)
            if found:
                text = f"{found.overall_psnr:.1f} dB, SSIM {found.overall_ssim:.3f}"
                draw.text((left, top + HEAD + CELL + 2), text, FAINT, small)
    return picture


def _still(frame: torch.Tensor) -> Image.Image:
    picture = Image.fromarray((frame * 255).round().byte().numpy())
    return picture.resize((CELL, CELL), Image.Resampling.BICUBIC)


def _differences(clips: Clips) -> Clips:
    """What is missing or too much in each clip against the first plan's, on grey."""
    return {
        f"{prompt}: difference to {next(iter(by_plan))}, {LOUDER} times": {
            plan: (0.5 + LOUDER * (clip - _first(by_plan))).clamp(0, 1)
            for plan, clip in by_plan.items()
        }
        for prompt, by_plan in clips.items()
    }


def _first(mapping: Mapping[Any, Any]) -> Any:
    return next(iter(mapping.values()))
