"""Speed of attention with its gradients on this machine's GPU, beside torch's own.

    python benchmarks/training.py [--quick] [--out FOLDER] [--commit HASH]

Forward and backward as autograd runs them: quantising, allocations and all. Contestants take turns,
each after a pause: an H200 that meets its power limit under one of them would run the next one
slower. Beside the times stand the gradients' cosines against FP64 on attention inputs of a language
model (tests/data), as in benchmarks/accuracy.py. --out writes training.json there; what documents
quote lies in benchmarks/results.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.accuracy import GRADIENT_TOKENS, load_layers
from sageattention3.benchmarks.attention import BASELINE, speed_table
from sageattention3.benchmarks.provenance import (
    add_gpu_options,
    gpu_provenance,
    require_gpu,
    write_result,
)
from sageattention3.kernels import backends
from sageattention3.kernels.dispatch import objection_of
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import exact_attention
from sageattention3.kernels.request import describe_request
from sageattention3.kernels.shapes import IMAGE_MODELS, Shape, random_qkv
from sageattention3.kernels.timing import GpuTimer, race

SHAPES = (
    *(
        Shape(f"{tokens // 1024}k, D{head_dim}{', causal' if causal else ''}", 2, 24, tokens,
              head_dim, causal)
        for head_dim in (128, 64)
        for causal in (False, True)
        for tokens in (4096, 16384)
    ),
    *IMAGE_MODELS,
)  # fmt: skip
QUICK = tuple(shape for shape in SHAPES if shape.name in ("4k, D128", "16k, D128", "16k, D64"))
# Five products of the backward pass beside two of the forward pass.
FLOPS_OF_FORWARD = 3.5

Attention = Callable[..., torch.Tensor]  # (q, k, v, causal) -> out


def sdpa(kind: SDPBackend, q, k, v, causal: bool) -> torch.Tensor:
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    with sdpa_kernel(kind):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def ours(train: Attention, q, k, v, causal: bool) -> torch.Tensor:
    return train(q, k, v, mask=None, scale=q.shape[-1] ** -0.5, causal=causal)


def contestants(shape: Shape, q, k, v) -> dict[str, Attention]:
    """Everything here that can train with this shape, by name; the baseline first."""
    found = {
        BASELINE: partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "torch cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    }
    request = describe_request(
        q, k, v, precision="int8", mask=None, causal=shape.causal, trainable=True
    )
    for backend in backends.BACKENDS:
        if backend.native and objection_of(backend, request) is None:
            found[backend.name] = partial(ours, backend.train)
    return found


def gradients(function: Attention, q, k, v, d_out, causal: bool) -> list[torch.Tensor]:
    """dQ, dK and dV; the forward pass runs anew."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(function(*leaves, causal=causal), leaves, d_out)


def cosines(function: Attention) -> dict[str, list[float]]:
    """Of dQ, dK and dV against FP64, one for each captured layer: bf16, a gaussian dO, causal."""
    found = {"dQ": [], "dK": [], "dV": []}
    for seed, qkv in enumerate(load_layers()):
        given = [x[:, :, :GRADIENT_TOKENS] for x in qkv]
        given.append(torch.randn(given[0].shape, generator=torch.Generator().manual_seed(seed)))
        given = [x.bfloat16().cuda() for x in given]
        mine = gradients(function, *given, True)
        right = gradients(exact_attention, *(x.double() for x in given), True)
        for name, cosine in cosines_against(mine, right).items():
            found[name].append(cosine)
    return found


def cosines_against(mine: list[torch.Tensor], right: list[torch.Tensor]) -> dict[str, float]:
    pairs = zip(("dQ", "dK", "dV"), mine, right, strict=True)
    return {name: round(compare(x, y).cosine, 5) for name, x, y in pairs}


def cosines_of_all() -> dict[str, dict[str, list[float]]]:
    q, k, v = (x[:, :, :GRADIENT_TOKENS].bfloat16().cuda() for x in load_layers()[0])
    shape = Shape("SmolLM2", *q.shape, causal=True)
    return {name: cosines(function) for name, function in contestants(shape, q, k, v).items()}


def measure(shape: Shape, timer: GpuTimer) -> dict:
    q, k, v = random_qkv(shape)
    d_out = torch.randn_like(q)
    found = contestants(shape, q, k, v)
    calls = {
        name: partial(gradients, function, q, k, v, d_out, shape.causal)
        for name, function in found.items()
    }
    return {
        **shape._asdict(),
        "flops": shape.flops * FLOPS_OF_FORWARD,
        "milliseconds": race(calls, timer).milliseconds,
    }


def show(results: list[dict], accuracy: dict, console: Console) -> None:
    names = list(dict.fromkeys(name for row in results for name in row["milliseconds"]))
    title = f"forward and backward: TFLOPS, and times {BASELINE}"
    console.print(speed_table(results, names, title))
    table = Table("", "dQ", "dK", "dV", title="cosine against FP64: mean (least) of the layers")
    for name, found in accuracy.items():
        means = (f"{sum(x) / len(x):.5f} ({min(x):.5f})" for x in found.values())
        table.add_row(name, *means)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three shapes only")
    add_gpu_options(parser, "training.json")
    options = parser.parse_args()
    require_gpu(parser)
    timer = GpuTimer()
    results = [measure(shape, timer) for shape in (QUICK if options.quick else SHAPES)]
    accuracy = cosines_of_all()
    show(results, accuracy, Console(width=100))
    if options.out:
        origin = gpu_provenance(options.commit, "kernels", "benchmarks/training.py")
        record = {**origin, "calls": results, "cosines": accuracy}
        write_result(options.out / "training.json", record)


if __name__ == "__main__":
    main()
