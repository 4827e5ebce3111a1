"""The worst frame of a comparison: reference, result, and where they differ."""

import math

import torch

from .comparison import Comparison, Sequences
from .figure import DPI, new_figure, render

PANEL_PIXELS = (256, 640)  # smallest and largest width of one picture
CAPTION_INCHES = 0.45
CURVE_INCHES = 1.8
HEAT = "magma"


def comparison_chart(pair: Sequences, comparison: Comparison) -> torch.Tensor:
    """An image [1, height, width, 3], float32 in 0..1; below it PSNR over frames, if several."""
    number = comparison.worst
    reference, result = (frames.flatten(0, 1)[number] for frames in pair[:2])
    difference = (result - reference).abs().mean(0)
    height, width = difference.shape
    panel = min(max(width, PANEL_PIXELS[0]), PANEL_PIXELS[1]) / DPI
    several = len(comparison.psnr) > 1
    rows = [panel * height / width + CAPTION_INCHES] + [CURVE_INCHES] * several
    figure = new_figure(3 * panel + 1.0, sum(rows), layout="constrained")
    grid = figure.add_gridspec(len(rows), 3, height_ratios=rows)
    name = f", number {number + 1}" if several else ""
    shown = ((f"reference{name}", reference), (f"result{name}", result))
    for column, (title, frame) in enumerate(shown):
        _picture(figure.add_subplot(grid[0, column]), title, frame)
    axes = figure.add_subplot(grid[0, 2])
    axes.set_axis_off()
    axes.set_title("difference, mean of channels", fontsize=9)
    # Its own scale, told beside it: a fixed one would show either nothing or only white.
    heat = axes.imshow(
        difference.numpy(), cmap=HEAT, vmin=0, vmax=max(difference.max().item(), 1e-9)
    )
    figure.colorbar(heat, ax=axes, fraction=0.046).ax.tick_params(labelsize=7)
    if several:
        _curve(figure.add_subplot(grid[1, :]), comparison)
    return render(figure)


def _picture(axes, title: str, frame: torch.Tensor) -> None:
    """``frame`` [channels, height, width]: in colour if it has three or four, else their mean."""
    axes.set_axis_off()
    axes.set_title(title, fontsize=9)
    if len(frame) in (3, 4):
        axes.imshow(frame[:3].movedim(0, -1).clamp(0, 1).numpy())
    else:
        axes.imshow(frame.mean(0).numpy(), cmap="gray")


def _curve(axes, comparison: Comparison) -> None:
    numbers = range(1, len(comparison.psnr) + 1)
    # Frames without any difference have no PSNR: the line is broken there.
    values = [math.nan if math.isinf(value) else value for value in comparison.psnr]
    axes.plot(numbers, values, color="#0072b2", marker=".", linewidth=1)
    axes.plot(comparison.worst + 1, values[comparison.worst], "o", color="#d55e00")
    axes.set_xlabel("frame", fontsize=8)
    axes.set_ylabel("PSNR, dB", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
