"""What each decision of a preset does to the latent, on tiny models with as many blocks as matter.

    python benchmarks/presets.py [--save]

Relative L1 of the latent against full precision, and the part of the attention calls that is
quantised, for the presets and for one decision changed at a time. Weights are random: a trained
model's edges differ more from its middle. --save also writes benchmarks/results/presets.json, from
which docs/choosing-a-preset.md quotes.
"""

from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.provenance import ROOT, run_on_cpu
from sageattention3.demo import host

RESULT = ROOT / "benchmarks" / "results" / "presets.json"
STEPS = 10
SEEDS = (0, 1, 2)
MODELS = {
    "wan_t2v": {"num_layers": 12},
    "flux": {"depth": 4, "depth_single_blocks": 8},
}
# Two blocks of the middle, where a preset keeps the first and the last.
MIDDLE = {"wan_t2v": "block.5-6", "flux": "single.1-2"}
INT8 = {"preset": "custom", "precision": "int8", "cross_attention": "fp16"}
FP4 = {**INT8, "precision": "fp4"}
EDGES = {"fp16_layers": "first 1, last 1"}
WINDOW = {"start_percent": 0.1, "end_percent": 0.9}


def plans(family: str) -> dict[str, dict[str, Any]]:
    """Widgets by name. Every call is long enough."""
    middle = {"fp16_layers": MIDDLE[family]}
    found = {
        **{f"preset {name}": {"preset": name} for name in ("balanced", "quality", "speed")},
        "int8": INT8,
        "int8, first and last block fp16": INT8 | EDGES,
        "int8, two middle blocks fp16": INT8 | middle,
        "fp4": FP4,
        "fp4, first and last block fp16": FP4 | EDGES,
        "fp4, two middle blocks fp16": FP4 | middle,
        "fp4, two blocks at either end fp16": FP4 | {"fp16_layers": "first 2, last 2"},
        "fp4, 10 % of sampling at either end fp16": FP4 | WINDOW,
        "fp4, first 20 % of sampling fp16": FP4 | {"start_percent": 0.2},
        "fp4, last 20 % of sampling fp16": FP4 | {"end_percent": 0.8},
    }
    if family == "wan_t2v":  # the one that has cross-attention
        found["int8, cross-attention too"] = INT8 | {"cross_attention": "same"}
        found["fp4, cross-attention too"] = FP4 | {"cross_attention": "same"}
    return found


def measure() -> dict:
    host.import_comfy()
    torch.set_num_threads(1)
    return {"steps": STEPS, "seeds": len(SEEDS), "models": {name: _rows(name) for name in MODELS}}


def _rows(family: str) -> dict[str, dict[str, float]]:
    from sageattention3.demo import tiny
    from sageattention3.demo.sampling import EVERYTHING, last_run, patched, sample
    from sageattention3.kernels.metrics import compare

    errors: dict[str, list[float]] = {plan: [] for plan in plans(family)}
    shares = {}
    for seed in SEEDS:
        model = tiny.model(family, seed, **MODELS[family])
        reference = sample(model, family, steps=STEPS, seed=seed)
        for plan, settings in plans(family).items():
            settings = {**EVERYTHING, "cross_attention": "fp16", **settings}
            quantised = patched(model, **settings)
            latent = sample(quantised, family, steps=STEPS, seed=seed)
            errors[plan].append(compare(latent, reference).rel_l1)
            counts = last_run(quantised).counts
            done = sum(n for entry, n in counts.items() if entry.precision != "fp16")
            shares[plan] = done / counts.total()
    return {
        plan: {
            "quantised": round(shares[plan], 3),
            "rel_l1": float(f"{mean(found):.3g}"),
            "smallest": float(f"{min(found):.3g}"),
            "largest": float(f"{max(found):.3g}"),
        }
        for plan, found in errors.items()
    }


def show(results: dict, console: Console) -> None:
    for family, rows in results["models"].items():
        table = Table("plan", "calls quantised", "relative L1", "of seeds", title=family)
        for plan, row in rows.items():
            span = f"{row['smallest']:.2g} .. {row['largest']:.2g}"
            table.add_row(plan, f"{row['quantised']:.0%}", f"{row['rel_l1']:.3g}", span)
        console.print(table)


if __name__ == "__main__":
    sources = ("kernels", "nodes", "demo", "benchmarks/presets.py")
    run_on_cpu(__doc__, RESULT, measure, show, sources)
