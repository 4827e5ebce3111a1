"""Bars of how many times as fast as the host's attention each precision is."""

from collections.abc import Sequence

import torch

from .charts import COLOURS
from .figure import new_figure, render
from .speed import HOST, Speed


def speed_chart(speeds: Sequence[Speed], precisions: Sequence[str], title: str) -> torch.Tensor:
    """An image [1, height, width, 3], float32 in 0..1; the host is the line at 1."""
    figure = new_figure(max(6.0, 1.6 * len(speeds) + 1.5), 3.6, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, wrap=True)
    if not speeds:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center")
        return render(figure)
    width = 0.8 / max(len(precisions), 1)
    for number, precision in enumerate(precisions):
        left = -0.4 + width * (number + 0.5)
        gains = [speed.gain(precision) or 0.0 for speed in speeds]
        places = [place + left for place in range(len(speeds))]
        bars = axes.bar(places, gains, width, color=COLOURS[precision], label=precision)
        axes.bar_label(bars, [f"{gain:.2f}" if gain else "-" for gain in gains], fontsize=7)
    axes.axhline(1, color=COLOURS["fp16, although less was wanted"], linewidth=1, label=HOST)
    names = [f"{speed.shape.name}\n{speed.shape.tokens:,} tokens" for speed in speeds]
    axes.set_xticks(range(len(speeds)), names, fontsize=8)
    axes.set_xlim(-0.6, len(speeds) - 0.4)
    axes.set_ylabel("times as fast as ComfyUI's", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(y=0.2)  # room for the legend
    axes.legend(fontsize=8, loc="upper left", ncols=len(precisions) + 1)
    return render(figure)
