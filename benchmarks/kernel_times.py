"""What each kernel of an INT8 call takes on this machine's GPU, one by one.

    python benchmarks/kernel_times.py [--out FOLDER] [--commit HASH]

benchmarks/attention.py times whole calls; here torch's profiler tells their kernels apart, so that
attention itself can be held against the rate of the tensor cores. --out writes kernel_times.json
there.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.attention import SHAPES
from sageattention3.benchmarks.provenance import (
    add_gpu_options,
    gpu_provenance,
    require_gpu,
    write_result,
)
from sageattention3.kernels import attention, capabilities
from sageattention3.kernels.shapes import Shape, random_qkv

CALLS, PAUSE_SECONDS = 9, 0.05


def median_microseconds(seen: Iterable[tuple[str, float]]) -> dict[str, float]:
    """By kernel, in the order of their first runs. seen: (name, microseconds) of each run."""
    taken = defaultdict(list)
    for name, microseconds in seen:
        taken[name.partition("<")[0].partition("(")[0].removeprefix("void ")].append(microseconds)
    return {name: statistics.median(times) for name, times in taken.items()}


def measure(shape: Shape, backend: str) -> dict[str, float]:
    q, k, v = random_qkv(shape)

    def call() -> None:
        attention(q, k, v, precision="int8", backend=backend, causal=shape.causal)

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            time.sleep(PAUSE_SECONDS)  # or the GPU meets its power limit
            call()
            torch.cuda.synchronize()
    return median_microseconds(
        (event.name, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and "int8" in event.name
    )


def show(results: list[dict], console: Console) -> None:
    table = Table("call", "backend", "kernel", "us", "TFLOPS")
    for row in results:
        for name, microseconds in row["microseconds"].items():
            speed = f"{row['flops'] / microseconds / 1e6:.0f}" if "attention" in name else ""
            table.add_row(row["name"], row["backend"], name, f"{microseconds:.0f}", speed)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_gpu_options(parser, "kernel_times.json")
    options = parser.parse_args()
    require_gpu(parser)
    device = torch.device("cuda", torch.cuda.current_device())
    backends = [
        row.backend
        for row in capabilities(device)
        if row.native and row.usable and row.precision == "int8"
    ]
    results = [
        {
            **shape._asdict(),
            "flops": shape.flops,
            "backend": backend,
            "microseconds": measure(shape, backend),
        }
        for shape in SHAPES
        for backend in backends
    ]
    show(results, Console())
    if options.out:
        origin = gpu_provenance(options.commit, "kernels", "benchmarks/kernel_times.py")
        write_result(options.out / "kernel_times.json", {**origin, "calls": results})


if __name__ == "__main__":
    main()
