"""How far latents are from full precision, beside what a calibration's profile foretells.

    python benchmarks/forecast.py [--save]

Tiny random models of every family that the demo can sample, with every call measured: everything in
one precision, and the choice within half of what FP4 would cost. --save also writes
benchmarks/results/forecast.json, from which docs/how-it-works.md quotes.
"""

from statistics import median

import torch
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.provenance import ROOT, run_on_cpu
from sageattention3.demo import host

STEPS = (4, 12)
BUDGET = "half of fp4"


def measure() -> dict:
    host.import_comfy()
    from sageattention3.demo.sampling import SAMPLED

    torch.set_num_threads(1)
    rows = [row for steps in STEPS for family in SAMPLED for row in _rows(family, steps)]
    ratios = {
        f"{steps} steps": sorted(r["measured"] / r["forecast"] for r in rows if r["steps"] == steps)
        for steps in STEPS
    }
    return {
        "measured over forecast": {
            name: {"median": round(median(found), 2), "largest": round(found[-1], 2)}
            for name, found in ratios.items()
        },
        "rows": rows,
    }


def _rows(family: str, steps: int) -> list[dict]:
    from sageattention3.demo import tiny
    from sageattention3.demo.sampling import calibrated, patched, sample
    from sageattention3.kernels.metrics import compare
    from sageattention3.nodes.engine.budget import choose, keep_worst

    model = tiny.model(family)
    profile, reference = calibrated(model, family, steps=steps)

    def row(plan: str, forecast: float, **settings) -> dict:
        latent = sample(patched(model, **settings), family, steps=steps)
        measured = compare(latent, reference).rel_l1
        return {
            "family": family,
            "steps": steps,
            "plan": plan,
            "forecast": float(f"{forecast:.3g}"),
            "measured": float(f"{measured:.3g}"),
        }

    rows = [row(p, keep_worst(profile, p, 0).error, precision=p) for p in profile.precisions]
    budget = keep_worst(profile, "fp4", 0).error / 2
    choice = choose(profile, budget)
    return [*rows, row(BUDGET, choice.error, profile=profile, max_error=budget)]


def show(results: dict, console: Console) -> None:
    table = Table("model", "steps", "plan", "forecast", "measured", "measured / forecast")
    for r in results["rows"]:
        ratio = r["measured"] / r["forecast"]
        table.add_row(
            r["family"],
            str(r["steps"]),
            r["plan"],
            f"{r['forecast']:.4f}",
            f"{r['measured']:.4f}",
            f"{ratio:.2f}",
        )
    console.print(table)
    console.print(results["measured over forecast"])


RESULT = ROOT / "benchmarks" / "results" / "forecast.json"
SOURCES = ("nodes/engine", "kernels/reference", "benchmarks/forecast.py", "demo/families.py")

if __name__ == "__main__":
    run_on_cpu(__doc__, RESULT, measure, show, SOURCES)
