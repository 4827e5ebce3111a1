"""Speed of native attention on this machine's GPU, beside torch's own and any installed peer.

    python benchmarks/attention.py [--quick] [--out FOLDER] [--commit HASH]

Times are of the public calls, quantisation included. Contestants take turns, each after a pause: an
H200 that meets its power limit under one of them would run the next one slower. --out writes
attention.json and attention.png there; what the README quotes lies in benchmarks/results.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.provenance import (
    add_gpu_options,
    gpu_provenance,
    require_gpu,
    write_result,
)
from sageattention3.kernels import attention, capabilities
from sageattention3.kernels.shapes import IMAGE_MODELS, VIDEO_MODELS, Shape, random_qkv
from sageattention3.kernels.timing import GpuTimer, race

BASELINE = "torch flash"
SHAPES = (
    Shape("4k, D128", 2, 24, 4096, 128),
    Shape("16k, D128", 2, 24, 16384, 128),
    Shape("4k, D64", 2, 24, 4096, 64),
    Shape("16k, D64", 2, 24, 16384, 64),
    Shape("16k, D128, causal", 2, 24, 16384, 128, causal=True),
    *IMAGE_MODELS,
    *VIDEO_MODELS,
)
QUICK = SHAPES[:4]
ENQUEUED = Shape("enqueue", 1, 8, 256, 128)


def sdpa(kind: SDPBackend, q, k, v, causal: bool) -> torch.Tensor:
    with sdpa_kernel(kind):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def ours(precision: str, backend: str, q, k, v, causal: bool) -> torch.Tensor:
    return attention(q, k, v, precision=precision, backend=backend, causal=causal)


def sage_attention(q, k, v, causal: bool) -> torch.Tensor:
    from sageattention import sageattn

    return sageattn(q, k, v, tensor_layout="HND", is_causal=causal)


def contestants() -> dict[str, Callable]:
    """Everything here that computes attention, by name; the baseline first."""
    found = {
        BASELINE: partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "torch cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    }
    if importlib.util.find_spec("sageattention"):
        found["sageattention"] = sage_attention
    for row in capabilities(torch.device("cuda", torch.cuda.current_device())):
        if row.native and row.usable:
            found[f"{row.precision} ({row.backend})"] = partial(ours, row.precision, row.backend)
    return found


def measure(shape: Shape, found: dict[str, Callable], timer: GpuTimer) -> dict[str, float]:
    """Median milliseconds of each contestant that takes this shape."""
    q, k, v = random_qkv(shape)
    calls = {name: partial(each, q, k, v, shape.causal) for name, each in found.items()}
    taken, refused = race(calls, timer)
    for name, reason in refused.items():
        print(f"{name} does not take {shape.name}: {reason}")
    return taken


def enqueue_microseconds(found: dict[str, Callable]) -> dict[str, float]:
    """CPU time of a call too small to matter on the GPU; of torch, what its default picks."""
    q, k, v = random_qkv(ENQUEUED)
    calls = {"torch": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v), **found}
    taken = {name: [] for name in calls}
    for _ in range(20):
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(50):
                call(q, k, v, False)
            taken[name].append((time.perf_counter() - started) / 50 * 1e6)
    return {name: statistics.median(times) for name, times in taken.items()}


def speed_table(results: list[dict], names: list[str], title: str) -> Table:
    """TFLOPS of ``names`` in each of ``results``, and how many times as fast as BASELINE."""
    table = Table("call", *names, title=title)
    for row in results:
        cells = []
        for name in names:
            taken = row["milliseconds"].get(name)
            ratio = taken and row["milliseconds"][BASELINE] / taken
            cells.append(f"{row['flops'] / taken / 1e9:.0f}  {ratio:.2f}x" if taken else "-")
        table.add_row(row["name"], *cells)
    return table


def show(results: list[dict], enqueue: dict[str, float], console: Console) -> None:
    names = list(enqueue)[1:]
    console.print(speed_table(results, names, f"TFLOPS, and times {BASELINE}"))
    baseline = enqueue["torch"]
    times = "; ".join(f"{n} {t:.1f} us ({t / baseline:.2f}x)" for n, t in enqueue.items())
    console.print(f"Enqueue time at {ENQUEUED.tokens} tokens: {times}")


def plot(results: list[dict], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in results for name in row["milliseconds"]))
    figure = Figure(figsize=(1.2 * len(results) + 2, 4), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [
            row["flops"] / row["milliseconds"][name] / 1e9 if name in row["milliseconds"] else 0
            for row in results
        ]
        axes.bar([x + i * width for x in range(len(results))], heights, width, label=name)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(results))])
    axes.set_xticklabels([row["name"] for row in results], rotation=25, ha="right")
    axes.set_ylabel("TFLOPS, quantisation included")
    axes.set_title(title, fontsize=10)
    axes.margins(y=0.2)  # room for the legend
    axes.legend(fontsize=8, loc="upper left", ncols=len(names))
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four shapes only")
    add_gpu_options(parser, "attention.json and attention.png")
    options = parser.parse_args()
    require_gpu(parser)
    found, timer = contestants(), GpuTimer()
    enqueue = enqueue_microseconds(found)
    results = [
        {
            **shape._asdict(),
            "flops": shape.flops,
            "milliseconds": measure(shape, found, timer),
        }
        for shape in (QUICK if options.quick else SHAPES)
    ]
    show(results, enqueue, Console(width=160))
    if options.out:
        machine = gpu_provenance(options.commit, "kernels", "benchmarks/attention.py")
        record = {**machine, "calls": results, "enqueue_microseconds": enqueue}
        write_result(options.out / "attention.json", record)
        title = f"{machine['machine']}, torch {machine['torch']}, {machine['date']}"
        plot(results, options.out / "attention.png", title)


if __name__ == "__main__":
    main()
