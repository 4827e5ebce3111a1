"""How near the quantising kernels come to the memory bandwidth of this machine's GPU.

    python benchmarks/quantisers.py [--out FOLDER] [--commit HASH]

Two rates for each: over the bytes that any quantiser has to move (Q, K and V once, what is written
once), and over those that ours ask for: INT8's V is read twice where it is long, int8_fp4's V and
fp4's K and V always, as their scales belong to the whole sequence. Beside them the rate of a plain
copy, in the same run. --out writes quantisers.json there.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.attention import QUICK
from sageattention3.benchmarks.provenance import (
    add_gpu_options,
    gpu_provenance,
    require_gpu,
    write_result,
)
from sageattention3.kernels.launch import int8_quantise, sm120_fp4
from sageattention3.kernels.shapes import VIDEO_MODELS, random_qkv
from sageattention3.kernels.timing import GpuTimer

SHAPES = (*QUICK, *(shape for shape in VIDEO_MODELS if shape.name == "Wan 2.1 14B"))
COPIED_BYTES = 1 << 30
ROUNDS, TIMES, PAUSE_SECONDS = 5, 10, 0.1


class Quantised(NamedTuple):
    """A call to time, and the bytes that it reads and writes at least, and as it is made."""

    call: Callable[[], object]
    needed: int
    asked: int


def int8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantised:
    q, k, v, layout = int8_quantise.readable(q, k, v)
    call = partial(int8_quantise.quantise, q, k, v, layout, live_keys=None, scale=0.1)
    needed = q.nbytes + k.nbytes + v.nbytes + layout.bytes
    return Quantised(call, needed, needed + v.nbytes * bool(layout.chunks))


def fp4(precision: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantised:
    options = {"masked": False, "smooth_q": precision == "fp4"}
    call = partial(sm120_fp4.pack, q, k, v, precision, None, 0.1, **options)
    needed = q.nbytes + k.nbytes + v.nbytes + call().buffer.nbytes
    return Quantised(call, needed, needed + v.nbytes + k.nbytes * (precision == "fp4"))


QUANTISERS = {"int8": int8, "fp4": partial(fp4, "fp4"), "int8_fp4": partial(fp4, "int8_fp4")}


def gigabytes_per_second(size: int, taken_ms: float) -> float:
    return size / taken_ms / 1e6


def median_ms(call: Callable[[], object], timer: GpuTimer) -> float:
    call()
    taken = []
    for _ in range(ROUNDS):
        time.sleep(PAUSE_SECONDS)
        taken += timer(call, TIMES)
    return statistics.median(taken)


def measure() -> dict:
    timer = GpuTimer()
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    copy = partial(torch.empty_like(source).copy_, source)
    copied = gigabytes_per_second(2 * COPIED_BYTES, median_ms(copy, timer))
    rows = []
    for shape in SHAPES:
        for name, prepare in QUANTISERS.items():
            call, needed, asked = prepare(*random_qkv(shape))
            taken = median_ms(call, timer)
            rows.append(
                {
                    "shape": shape.name,
                    "quantiser": name,
                    "milliseconds": taken,
                    "needed": gigabytes_per_second(needed, taken),
                    "asked": gigabytes_per_second(asked, taken),
                }
            )
    return {"unit": "GB/s", "copy": copied, "rows": rows}


def show(results: dict, console: Console) -> None:
    copied = results["copy"]
    title = f"GB/s, and share of a copy's {copied:.0f}"
    table = Table("call", "quantiser", "us", "bytes needed", "bytes asked for", title=title)
    for row in results["rows"]:
        rates = (f"{row[kind]:.0f}  {row[kind] / copied:.0%}" for kind in ("needed", "asked"))
        table.add_row(row["shape"], row["quantiser"], f"{row['milliseconds'] * 1e3:.0f}", *rates)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_gpu_options(parser, "quantisers.json")
    options = parser.parse_args()
    require_gpu(parser)
    results = measure()
    show(results, Console())
    if options.out:
        origin = gpu_provenance(options.commit, "kernels", "benchmarks/quantisers.py")
        write_result(options.out / "quantisers.json", {**origin, **results})


if __name__ == "__main__":
    main()
