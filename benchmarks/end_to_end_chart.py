"""The picture of end_to_end.py's result: what a step consists of, and how much of it is left."""

from pathlib import Path
from typing import Any

# Okabe-Ito colours; the host recedes as grey.
COLOURS = {"attention, host": "#808080", "attention, quantised": "#56b4e9", "the rest": "#d0d0d0"}


def plot(results: dict[str, Any], path: Path) -> None:
    """One group of bars per workload; 1 is the step time with the host's attention."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [
        (row["name"], name, taken, row["variants"]["host"]["seconds"])
        for row in results["workloads"]
        for name, taken in row["variants"].items()
    ]
    figure = Figure(figsize=(9, 0.42 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for y, (_, name, taken, whole) in enumerate(rows):
        attention = taken["attention_seconds"] / whole
        rest = taken["seconds"] / whole - attention
        kind = "attention, host" if name == "host" else "attention, quantised"
        axes.barh(y, rest, color=COLOURS["the rest"])
        axes.barh(y, attention, left=rest, color=COLOURS[kind])
        axes.text(rest + attention, y, f" {taken['seconds']:.2f} s", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)))
    axes.set_yticklabels(
        [f"{workload}   {name}" if name == "host" else name for workload, name, *_ in rows],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("a step of sampling, as part of one with the host's attention", fontsize=8)
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in COLOURS.items()],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    axes.set_title(f"{results['machine']}, torch {results['torch']}, {results['date']}", fontsize=9)
    figure.savefig(path, dpi=130)
