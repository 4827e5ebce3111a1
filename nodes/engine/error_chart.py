"""The picture of a profile: what each layer would cost the latent in each precision."""

import numpy as np
import torch

from .budget import Choice
from .charts import COLOURS, add_legend
from .figure import new_figure, render
from .forecast import contributions
from .profile import Profile

ROW_INCHES = 0.24
KEPT = "#c0392b"  # of the names of layers that stay in fp16
DECADES = 4  # of errors shown; smaller ones are cut off


def error_chart(profile: Profile, choice: Choice) -> torch.Tensor:
    """``profile`` as an image [1, height, width, 3], float32 in 0..1.

    A bar per layer and precision, long where running the layer in it moves the latent far. What
    ``choice`` takes is drawn solid, the rest pale; layers that it keeps in fp16 are marked.
    """
    from matplotlib.colors import to_rgba

    precisions = profile.precisions
    added = {p: contributions(profile, p).sum(1) for p in precisions}
    finite = np.concatenate([values[np.isfinite(values)] for values in added.values()])
    high = max(finite.max(initial=0), 1e-6) * 1.5
    low = max(high / 10**DECADES, min(finite[finite > 0].min(initial=high), high / 10) / 2)

    count = len(profile.layers)
    width, height = 8.0, 1.75 + count * ROW_INCHES
    figure = new_figure(width, height)
    axes = figure.add_axes(
        (1.6 / width, 0.55 / height, (width - 2.6) / width, count * ROW_INCHES / height)
    )
    axes.set_xscale("log")
    thickness = 0.8 / len(precisions)
    for number, precision in enumerate(precisions):
        values = added[precision]
        taken = [choice.precisions[layer] == precision for layer in profile.layers]
        axes.barh(
            np.arange(count) - 0.4 + (number + 0.5) * thickness,
            np.clip(values, low, high),
            thickness,
            color=[to_rgba(COLOURS[precision], 1.0 if solid else 0.35) for solid in taken],
            hatch=[None if known else "////" for known in np.isfinite(values)],
        )
    axes.set(xlim=(low, high), ylim=(count - 0.5, -0.5))
    axes.set_xlabel("forecast error of the latent by this layer alone (relative L1)", fontsize=8)
    axes.set_yticks(range(count), profile.layers, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    for row, (layer, label) in enumerate(zip(profile.layers, axes.get_yticklabels(), strict=True)):
        chosen = choice.precisions[layer]
        if chosen == "fp16":
            label.set(color=KEPT, fontweight="bold")
            axes.axhspan(row - 0.5, row + 0.5, color=KEPT, alpha=0.08, linewidth=0)
        axes.text(
            1.01,
            row,
            chosen,
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=7,
            color=KEPT if chosen == "fp16" else "black",
        )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)

    kept = len(choice.layers_in("fp16"))
    title = f"{profile.origin.family}: forecast error {choice.error:.3g}, {kept} of {count} layers "
    figure.text(0.15 / width, 1 - 0.3 / height, title + "in fp16", fontsize=10, weight="bold")
    figure.text(
        0.15 / width,
        1 - 0.52 / height,
        "Solid: the chosen precision, named on the right. Pale: what the others would cost. "
        "Hatched: not known.",
        fontsize=8,
    )
    add_legend(figure, precisions, below_top=0.6)
    return render(figure)
