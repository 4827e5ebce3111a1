"""The heat strip: which precision each layer ran in at each step, as a picture."""

from collections.abc import Sequence
from typing import Any

import torch

from .figure import new_figure, render
from .ledger import Entry, Run

# Okabe-Ito colours, told apart with every common colour blindness; the host's own recede as greys.
COLOURS = {
    "fp16": "#d0d0d0",
    "fp16, although less was wanted": "#808080",
    "int8": "#56b4e9",
    "int8_fp4": "#009e73",
    "fp4": "#e69f00",
}
EMPTY = "#ffffff"
CELL_INCHES = (0.26, 0.19)  # of one step, of one layer: room for a label of 7 points
LABELS_AT_MOST = 60  # longer axes label every second, third ... row


def add_legend(figure: Any, names: Sequence[str], below_top: float) -> None:
    """The colours of ``names`` in one row, ``below_top`` inches under the figure's upper edge."""
    from matplotlib.patches import Patch

    width, height = figure.get_size_inches()
    figure.legend(
        handles=[Patch(color=COLOURS[name], label=name) for name in names],
        loc="upper left",
        bbox_to_anchor=(0.05 / width, 1 - below_top / height),
        ncols=len(names),
        frameon=False,
        fontsize=8,
    )


def heat_strip(run: Run) -> torch.Tensor:
    """``run`` as an image [1, height, width, 3], float32 in 0..1: layers down, steps across."""
    from matplotlib.colors import ListedColormap

    layers = run.layers()
    cells = {cell: _kind(entry) for cell, entry in run.cells().items()}
    steps = max(1, run.steps, *(step + 1 for _, step in cells))
    shown = [kind for kind in COLOURS if kind in cells.values()]
    codes = {kind: code for code, kind in enumerate(COLOURS, start=1)}
    grid = [[codes.get(cells.get((layer, step)), 0) for step in range(steps)] for layer in layers]

    width = max(6.0, 2.2 + steps * CELL_INCHES[0])
    height = 1.4 + max(len(layers), 1) * CELL_INCHES[1]
    figure = new_figure(width, height)
    axes = figure.add_axes(
        (1.6 / width, 0.55 / height, (width - 2.0) / width, (height - 1.4) / height)
    )
    if layers:
        axes.pcolormesh(
            grid,
            cmap=ListedColormap([EMPTY, *COLOURS.values()]),
            vmin=-0.5,
            vmax=len(COLOURS) + 0.5,
            edgecolors=EMPTY,
            linewidth=0.6,
        )
    else:
        axes.text(0.5, 0.5, "no attention call was counted", ha="center", va="center")
    axes.set(xlim=(0, steps), ylim=(max(len(layers), 1), 0), xlabel="step")
    _label(axes.xaxis, [str(step + 1) for step in range(steps)])
    _label(axes.yaxis, layers)
    for spine in axes.spines.values():
        spine.set_visible(False)
    title = ", ".join(filter(None, (run.title, run.interruption())))
    figure.text(0.15 / width, 1 - 0.3 / height, title, fontsize=10, weight="bold")
    if shown:
        add_legend(figure, shown, below_top=0.4)
    return render(figure)


def _kind(entry: Entry) -> str:
    return "fp16, although less was wanted" if entry.fallback else entry.precision


def _label(axis, names: Sequence[str]) -> None:
    """A tick in the middle of each cell, thinned out where they would overlap."""
    every = -(-len(names) // LABELS_AT_MOST) or 1
    axis.set_ticks([i + 0.5 for i in range(0, len(names), every)], names[::every], fontsize=7)
    axis.set_tick_params(length=0)
