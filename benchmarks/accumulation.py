"""How errors of attention grow from layer to layer of a model: the paper's table 15.

    python benchmarks/accumulation.py [--save]

A video model of ComfyUI's own class (Wan 2.1, 30 blocks, 128 channels per head, 768 tokens) with
seeded random weights, since no trained one is small enough; needs the demo's host. One forward
pass with the host's attention in FP32, one with every attention in a quantised precision: the
relative L1 difference of what goes from block to block. In the second half of the table the three
blocks stay in FP16 that alone move the model's output most. --save also writes
benchmarks/results/accumulation.json, from which docs/numerics.md quotes.
"""

from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.provenance import ROOT, run_on_cpu
from sageattention3.demo import host, tiny
from sageattention3.demo.families import FAMILIES
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import SCHEMES, Scheme

RESULT = ROOT / "benchmarks" / "results" / "accumulation.json"
DEPTH = 30
SHOWN = (1, 10, 20, 30)  # blocks, as in the paper
SENSITIVE = 3
NAME = "wan_t2v_deep"
PUBLISHED = {  # CogVideoX-2B: mean L1 difference, so that only the course compares
    "all in FP4": (0.0076, 0.0922, 0.1146, 0.0571),
    "three in FP16": (0.0076, 0.0447, 0.0773, 0.0429),
}


def deep_family() -> None:
    """Registers the model with the demo's families."""
    wan = FAMILIES["wan_t2v"]
    config = {**wan.config, "num_layers": DEPTH}
    FAMILIES[NAME] = replace(wan, name=NAME, config=config, latent=(16, 3, 32, 32))


class Blocks:
    """What goes from block to block in one forward pass of a model."""

    def __init__(self, model):
        self.model = model
        self.states: list[torch.Tensor] = []
        for block in model.model.diffusion_model.blocks:
            block.register_forward_hook(lambda _block, _given, out: self.states.append(out.clone()))

    def run(self, **settings) -> list[torch.Tensor]:
        from sageattention3.demo.sampling import forward, patched

        self.states = []
        forward(patched(self.model, **settings) if settings else self.model, NAME)
        return self.states


def differences(mine: list[torch.Tensor], right: list[torch.Tensor]) -> list[float]:
    return [round(compare(x, y).rel_l1, 5) for x, y in zip(mine, right, strict=True)]


def most_sensitive(blocks: Blocks, right: list[torch.Tensor], precision: str) -> list[int]:
    """The blocks that, each quantised alone, move the last state most."""
    moved = []
    for block in range(DEPTH):
        others = ", ".join(f"block.{i}" for i in range(DEPTH) if i != block)
        states = blocks.run(precision=precision, fp16_layers=others)
        moved.append((compare(states[-1], right[-1]).rel_l1, block))
    return sorted(block for _, block in sorted(moved, reverse=True)[:SENSITIVE])


def measure() -> dict:
    host.import_comfy()
    deep_family()
    blocks = Blocks(tiny.model(NAME))
    right = blocks.run()
    rows = {}
    best = SCHEMES["fp4"]
    SCHEMES["fp4"] = Scheme()
    rows["SageAttention3 as published"] = differences(blocks.run(precision="fp4"), right)
    SCHEMES["fp4"] = best
    for precision in SCHEMES:
        rows[precision] = differences(blocks.run(precision=precision), right)
    kept = most_sensitive(blocks, right, "fp4")
    spared = ", ".join(f"block.{i}" for i in kept)
    for precision in SCHEMES:
        name = f"{precision}, three blocks in FP16"
        rows[name] = differences(blocks.run(precision=precision, fp16_layers=spared), right)
    return {
        "blocks": list(range(1, DEPTH + 1)),
        "kept in FP16": [i + 1 for i in kept],
        "relative L1 difference after each block": rows,
        "published, CogVideoX-2B, L1": PUBLISHED,
    }


def show(results: dict, console: Console) -> None:
    table = Table("relative L1 after block", *map(str, SHOWN))
    for name, row in results["relative L1 difference after each block"].items():
        table.add_row(name, *(f"{row[i - 1]:.4f}" for i in SHOWN))
    console.print(table)
    console.print("blocks kept in FP16:", results["kept in FP16"])


SOURCES = ("kernels/reference", "benchmarks/accumulation.py", "demo")

if __name__ == "__main__":
    run_on_cpu(__doc__, RESULT, measure, show, SOURCES)
