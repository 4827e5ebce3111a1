"""The picture of end_to_end.py's result: what a step consists of, and how much of it is left."""

from pathlib import Path
from typing import Any

# Okabe-Ito colours; the host recedes as grey.
ATTENTION, REST = {"host": "#808080"}, "#d0d0d0"
OURS = "#56b4e9"


def plot(results: dict[str, Any], path: Path) -> None:
    """One group of bars per workload, from 0 to the step time with the host's attention."""
    from matplotlib.figure import Figure

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
        axes.barh(y, rest, color=REST)
        axes.barh(y, attention, left=rest, color=ATTENTION.get(name, OURS))
        axes.text(rest + attention, y, f" {taken['seconds']:.2f} s", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)))
    axes.set_yticklabels(
        [f"{workload}   {name}" if name == "host" else name for workload, name, *_ in rows],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("a step of sampling, as part of one with the host's attention", fontsize=8)
    from matplotlib.patches import Patch

    shown = {"attention, host": ATTENTION["host"], "attention, quantised": OURS, "the rest": REST}
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in shown.items()],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    axes.set_title(f"{results['machine']}, torch {results['torch']}, {results['date']}", fontsize=9)
    figure.savefig(path, dpi=130)
