"""What each precision does to the clips of the demo's trained video model, and layer by layer.

    python benchmarks/trained_video.py [--save]

Pictures against the same clip by the host's own attention: PSNR, SSIM, flicker, over sixteen
prompts; and what each layer's attention loses (the paper's table 15). --save also writes
benchmarks/results/trained_video.json, from which docs/results.md quotes.
"""

from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.provenance import ROOT, run_on_cpu
from sageattention3.demo import gallery, host, video
from sageattention3.kernels.metrics import compare
from sageattention3.nodes.engine.comparison import compare_sequences, pair_up
from sageattention3.nodes.engine.forecast import contributions
from sageattention3.nodes.engine.profile import Profile

RESULT = ROOT / "benchmarks" / "results" / "trained_video.json"
STEPS = gallery.STEPS
PROMPTS = (
    *gallery.PROMPTS,
    "cyan square down over orange plain",
    "green ring growing over red stripes",
    "orange three right over cyan checks",
    "purple cross up over yellow dots",
    "blue triangle still over white plain",
    "white circle circling over red dots",
    "red four growing over white stripes",
    "yellow square spinning over blue checks",
    "cyan two up over purple plain",
    "green star left over orange stripes",
    "orange moon down over green dots",
    "purple one right over cyan plain",
    "blue cross circling over yellow checks",
)
MIDDLE = 0.7  # noise level of the pass that is followed from block to block


def measure() -> dict:
    host.import_comfy()
    model = video.load_model()
    profile = video.calibrate(model, gallery.CALIBRATED_ON, seed=100, steps=STEPS)
    plans = video.plans(model, profile)
    rows: dict[str, list[dict[str, float]]] = {plan: [] for plan in plans if plan != "fp16"}
    for seed, prompt in enumerate(PROMPTS):
        reference = video.make_latent(model, prompt, seed, STEPS)
        for plan in rows:
            latent = video.make_latent(plans[plan], prompt, seed, STEPS)
            rows[plan].append(_figures(reference, latent))
        print(seed + 1, prompt, flush=True)
    return {
        "steps": STEPS,
        "prompts": list(PROMPTS),
        "worst_layers": video.worst_layers(profile),
        "kept_in_fp16": video.worst_layers(profile)[: video.WORST],
        "plans": {plan: _summary(found) for plan, found in rows.items()},
        "layers": _layers(profile),
        "rel_l1_after_each_block": _accumulated(plans),
    }


def _figures(reference: torch.Tensor, latent: torch.Tensor) -> dict[str, float]:
    found = compare_sequences(pair_up(video.pictures(reference), video.pictures(latent)))
    return {
        "psnr": found.overall_psnr,
        "ssim": found.overall_ssim,
        "flicker": found.motion.energy,
        "latent_rel_l1": compare(latent, reference).rel_l1,
    }


def _summary(found: list[dict[str, float]]) -> dict[str, Any]:
    """Mean and standard error of each figure, and every prompt's PSNR for paired comparisons."""
    summary: dict[str, Any] = {}
    for name in found[0]:
        values = [figures[name] for figures in found]
        error = stdev(values) / len(values) ** 0.5
        summary[name] = {"mean": _short(mean(values)), "error": _short(error)}
    return {**summary, "psnr_of_prompts": [round(figures["psnr"], 2) for figures in found]}


def _layers(profile: Profile) -> dict[str, Any]:
    """Means over the steps of each layer's errors, and what the layer alone does to the latent."""
    table = {}
    for row, layer in enumerate(profile.layers):
        table[layer] = {
            precision: {
                **{
                    metric: _short(values[row].nanmean().item())
                    for metric, values in profile.errors[precision].items()
                },
                "latent_forecast": _short(contributions(profile, precision)[row].sum()),
            }
            for precision in profile.precisions
        }
    return table


def _accumulated(plans: video.Models) -> dict[str, list[float]]:
    """How errors grow from block to block in one pass in the middle of sampling."""
    latent = video.make_latent(plans["fp16"], gallery.CALIBRATED_ON, 100, STEPS)
    found = {
        plan: video.block_states(model, latent, gallery.CALIBRATED_ON, MIDDLE)
        for plan, model in plans.items()
    }
    right = found.pop("fp16")
    return {
        plan: [_short(compare(x, y).rel_l1) for x, y in zip(states, right, strict=True)]
        for plan, states in found.items()
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def show(results: dict, console: Console) -> None:
    table = Table("plan", "PSNR, dB", "SSIM", "flicker", "latent, rel. L1")
    for plan, row in results["plans"].items():
        cells = [row[name] for name in ("psnr", "ssim", "flicker", "latent_rel_l1")]
        table.add_row(plan, *(f"{cell['mean']:.4g} ± {cell['error']:.2g}" for cell in cells))
    console.print(table)
    precisions = list(next(iter(results["layers"].values())))
    table = Table("layer", *(f"{p}: {what}" for p in precisions for what in ("rel. L1", "latent")))
    for layer, row in results["layers"].items():
        cells = (row[p][name] for p in precisions for name in ("rel_l1", "latent_forecast"))
        table.add_row(layer, *(f"{cell:.3g}" for cell in cells))
    console.print(table)
    states = results["rel_l1_after_each_block"]
    blocks = len(next(iter(states.values())))
    table = Table("relative L1 after block", *map(str, range(1, blocks + 1)))
    for plan, row in states.items():
        table.add_row(plan, *(f"{value:.4f}" for value in row))
    console.print(table)


if __name__ == "__main__":
    sources = ("kernels", "nodes", "demo", "benchmarks/trained_video.py")
    run_on_cpu(__doc__, RESULT, measure, show, sources)
