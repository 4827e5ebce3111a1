"""How fast FP4 attention could be on an RTX 5090, by what its kernels issue: a model, not measured.

    python benchmarks/fp4_speed_model.py [--save]

Builds the native kernels, counts one turn of their loops (16 rows x 128 keys per warp) and divides
by the rates below; --save also writes benchmarks/results/fp4_speed_model.json, from which
docs/fp4.md quotes. Two bounds: all units busy beside each other, and matrix products and
exponentials one after the other, as with too few warps to overlap them. The reference
implementation's counts, put through the same model, give the second within two percent of its
published figure.
"""

from typing import NamedTuple

from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.provenance import ROOT, run_on_cpu
from sageattention3.kernels.jit.build import build
from sageattention3.kernels.jit.report import make_report
from sageattention3.kernels.launch.fp4_quantise import BLOCK_KEYS
from sageattention3.kernels.launch.sm120_fp4 import NATIVE, TILES, attention_variant

RESULT = ROOT / "benchmarks" / "results" / "fp4_speed_model.json"
ASSUMED = {
    "gpu": "RTX 5090: 170 multiprocessors of 4 schedulers at 2.407 GHz",
    "tensor": "16 cycles per FP4 product of m16n8k64, 1676 TFLOPS dense, and per INT8 product of "
    "m16n8k32, 838 TOPS dense (NVIDIA's white paper)",
    "mufu": "8 cycles per exponential or logarithm of a warp",
    "issue": "1 cycle per instruction",
    "left out": "starts and ends of rows, quantising, memory, power limits",
}
SCHEDULERS, GHZ = 170 * 4, 2.407
TENSOR_CYCLES, MUFU_CYCLES = 16, 8
TILE_KEYS, ROWS = 128, 16


class Loop(NamedTuple):
    """What a warp issues for 16 rows x 128 keys."""

    head_dim: int
    slots: int
    tensor: int
    mufu: int

    @property
    def operations(self) -> int:
        return 2 * 2 * ROWS * TILE_KEYS * self.head_dim

    def tops(self, cycles: float) -> float:
        return self.operations * SCHEDULERS * GHZ / cycles / 1e3

    def bounds(self) -> dict[str, float]:
        tensor, mufu = self.tensor * TENSOR_CYCLES, self.mufu * MUFU_CYCLES
        return {
            "overlapped": round(self.tops(max(tensor, mufu, self.slots))),
            "serial": round(self.tops(max(tensor + mufu, self.slots))),
        }


# thu-ml/SageAttention, sageattention3_blackwell of early 2026, by nvcc 13.0; counted by hand.
PEERS = {
    "reference implementation, 64 channels": Loop(64, 705, 32, 82),
    "reference implementation, 128 channels": Loop(128, 853, 64, 82),
}
PUBLISHED = {"reference implementation, 128 channels": 1038}  # TOPS, SageAttention3's abstract


def loops() -> dict[str, Loop]:
    keys = [
        (precision, d, smooth, masked)
        for precision, d, masked in TILES
        for smooth in ((False, True) if precision == "fp4" else (False,))
    ]
    report = make_report(build((attention_variant(NATIVE, *key), 120) for key in keys))
    found = {}
    for (precision, d, smooth, masked), row in zip(keys, report, strict=True):
        name = f"{d} channels{', Q smoothed' if smooth else ''}{', masked' if masked else ''}"
        turns = TILE_KEYS // (BLOCK_KEYS * TILES[precision, d, masked].blocks)
        counts = (turns * row.loop[unit] for unit in ("total", "tensor", "mufu"))
        found[name if precision == "fp4" else f"{precision}, {name}"] = Loop(d, *counts)
    return found


def measure() -> dict:
    rows = {
        name: {**loop._asdict(), **loop.bounds(), "published": PUBLISHED.get(name)}
        for name, loop in {**loops(), **PEERS}.items()
    }
    return {"assumed": ASSUMED, "loops": rows}


def show(results: dict, console: Console) -> None:
    columns = ("slots", "tensor", "mufu", "overlapped", "serial", "published")
    table = Table("TOPS of a model, not measured", *columns)
    for name, row in results["loops"].items():
        table.add_row(
            name, *("" if row[column] is None else str(row[column]) for column in columns)
        )
    console.print(table)
    for what, how in results["assumed"].items():
        console.print(f"{what}: {how}")


SOURCES = ("kernels/cuda", "kernels/launch", "benchmarks/fp4_speed_model.py")

if __name__ == "__main__":
    run_on_cpu(__doc__, RESULT, measure, show, SOURCES)
