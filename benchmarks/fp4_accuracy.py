"""What decides the defaults of FP4 attention: one thing changed at a time, on real and made inputs.

    python benchmarks/fp4_accuracy.py [--save]

Against FP64, causal on tests/data/qkv_smollm2.safetensors; --save also writes
benchmarks/results/accuracy_fp4.json, from which docs/fp4.md quotes. Schemes are the reference
algorithms; "the kernels' model" is what kernels/cuda computes, step by step.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.accuracy import load_layers, summary
from sageattention3.benchmarks.provenance import ROOT, run_on_cpu
from sageattention3.kernels.launch.sm120_fp4 import TILES
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import (
    SCHEMES,
    Scheme,
    exact_attention,
    formats,
    fp4_model,
    int8_fp4_model,
    reference_attention,
)

PAPER, FP4 = Scheme(), SCHEMES["fp4"]
UNBALANCED = replace(FP4, balance=False, rotate=False)
ROTATED = replace(FP4, balance=False)
WHOLE_HEAD = 1 << 20  # queries per mean, more than there are
FINEST_TARGETS = (6.0, 5.5, 5.0, 4.75, 4.5, 4.25, 4.0, 7.0)


@contextmanager
def search_targets(targets: tuple[float, ...]):
    saved, formats.SEARCH_TARGETS = formats.SEARCH_TARGETS, targets
    try:
        yield
    finally:
        formats.SEARCH_TARGETS = saved


def kernel_model(q, k, v, *, scheme: Scheme, causal: bool) -> torch.Tensor:
    """The kernels' model, with the queries per mean that the kernels of this head_dim take."""
    tokens = TILES["fp4", q.shape[-1], False].q_block_tokens
    _, operands = fp4_model.quantise(
        q, k, v, scale=q.shape[-1] ** -0.5, q_block_tokens=tokens, smooth_q=scheme.smooth_q
    )
    return fp4_model.attend(operands, causal=causal)[0]


def int8_kernel_model(q, k, v, *, scheme: Scheme, causal: bool) -> torch.Tensor:
    _, operands = int8_fp4_model.quantise(q, k, v, scale=q.shape[-1] ** -0.5)
    return fp4_model.attend(operands, causal=causal)[0]


def balanced_by_largest(q, k):
    """Q and K with the largest deviation of each channel made alike in both."""
    group = q.shape[1] // k.shape[1]
    k_size = (k - k.mean(2, keepdim=True)).abs().amax(2, keepdim=True)
    q_size = (q - q.mean(2, keepdim=True)).abs().amax(2, keepdim=True)
    q_size = q_size.unflatten(1, (-1, group)).amax(2)
    factor = (k_size / q_size) ** 0.5
    return q * factor.repeat_interleave(group, 1), k / factor


def sorted_channels(q, k):
    """Q and K with channels in the order of K's deviation, so that like sizes share a scale."""
    order = k.std(2).argsort(-1)[:, :, None]
    q_order = order.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return q.gather(-1, q_order.expand_as(q)), k.gather(-1, order.expand_as(k))


@lru_cache(maxsize=8)  # the rows of a table have their inputs in common
def exact(q, k, v, causal: bool) -> torch.Tensor:
    return exact_attention(q, k, v, causal=causal)


def errors(tensors, scheme=FP4, *, rewrite=None, forward=reference_attention, causal=True) -> dict:
    found = []
    for q, k, v in tensors:
        right = exact(q, k, v, causal)
        if rewrite:
            q, k = rewrite(q, k)
        found.append(compare(forward(q, k, v, scheme=scheme, causal=causal), right))
    return summary(found)


def targets_row(layers, targets: tuple[float, ...]) -> dict:
    with search_targets(targets):
        return errors(layers)


def real_tables(layers) -> dict:
    return {
        "Schemes": {
            "paper": errors(layers, PAPER),
            "fp4": errors(layers),
            "fp4, the kernels' model": errors(layers, forward=kernel_model),
            "int8_fp4": errors(layers, SCHEMES["int8_fp4"]),
            "int8_fp4, the kernels' model": errors(layers, forward=int8_kernel_model),
        },
        "Queries per mean": {
            "no smoothing of Q": errors(layers, replace(FP4, smooth_q=False)),
            "all of a head": errors(layers, replace(FP4, block_q=WHOLE_HEAD)),
            **{str(n): errors(layers, replace(FP4, block_q=n)) for n in (256, 192, 128, 96, 64)},
        },
        "Targets of the search for scales": {
            ", ".join(f"{t:g}" for t in targets): targets_row(layers, targets)
            for targets in (
                (6.0,),
                (6.0, 4.0),
                (6.0, 5.0, 4.0),
                formats.SEARCH_TARGETS,
                (*formats.SEARCH_TARGETS, 7.0),
                FINEST_TARGETS,
            )
        },
        "One thing changed": {
            "V not smoothed": errors(layers, replace(FP4, smooth_v=False)),
            "sum of P before quantising": errors(layers, replace(FP4, quantised_row_sum=False)),
            "neither balanced nor rotated": errors(layers, UNBALANCED),
            "rotated alone": errors(layers, ROTATED),
            "balanced alone": errors(layers, replace(FP4, rotate=False)),
            "balanced by the largest value": errors(layers, ROTATED, rewrite=balanced_by_largest),
            "channels sorted instead": errors(layers, UNBALANCED, rewrite=sorted_channels),
            "Q and K exact": errors(layers, replace(FP4, qk="exact")),
            "P and V exact": errors(layers, replace(FP4, pv="exact")),
        },
    }


def synthetic_inputs() -> dict[str, list]:
    """Gaussian tensors, and what real ones do to them; not causal, 128 channels."""
    generator = torch.Generator().manual_seed(0)

    def normal():
        return [torch.randn(1, 4, 1024, 128, generator=generator) for _ in range(3)]

    q, k, v = normal()
    biased_k, biased_q = k.clone(), q.clone()
    biased_k[..., [5, 40, 77, 100]] += torch.tensor([8.0, -12.0, 15.0, 20.0])
    biased_q[..., [5, 40, 77, 100]] += torch.tensor([8.0, 12.0, -5.0, 20.0])
    outlier_q, outlier_k = q.clone(), k.clone()
    outlier_q[..., [3, 50]] /= 30
    outlier_k[..., [3, 50]] *= 30
    both_q, both_k, sink_k = q.clone(), k.clone(), k.clone()
    both_q[..., [3, 50]] *= 5
    both_k[..., [3, 50]] *= 5
    sink_k[:, :, 0] *= 25
    return {
        "normal": [(q, k, v)],
        "peaked (Q x 4)": [(4 * q, k, v)],
        "K biased": [(q, biased_k, v)],
        "Q and K biased alike": [(biased_q, biased_k, v)],
        "V with a mean": [(q, k, v + 3)],
        "V x 0.001": [(q, k, v * 1e-3)],
        "two zero-mean channels of K x 30, of Q / 30": [(outlier_q, outlier_k, v)],
        "two channels of Q and K x 5": [(both_q, both_k, v)],
        "one key x 25": [(q, sink_k, v)],
    }


def synthetic_tables() -> dict:
    rows = {
        "paper": {"scheme": PAPER},
        "fp4, the kernels' model": {"forward": kernel_model},
        "neither balanced nor rotated": {"scheme": UNBALANCED},
        "rotated alone": {"scheme": ROTATED},
        "balanced alone": {"scheme": replace(FP4, rotate=False)},
        "balanced by the largest value": {"scheme": ROTATED, "rewrite": balanced_by_largest},
        "int8_fp4, the kernels' model": {"forward": int8_kernel_model},
    }
    return {
        f"Synthetic: {name}": {row: errors(x, causal=False, **how) for row, how in rows.items()}
        for name, x in synthetic_inputs().items()
    }


def tile_pattern(layers) -> dict[str, float]:
    """Autocorrelation of the error along queries at the period of Q's blocks, and around it.

    Blocks that print a pattern into the output would show as a peak at their period.
    """
    period = TILES["fp4", 64, False].q_block_tokens
    lags = {"before": period - 7, "period": period, "after": period + 7}
    sums = dict.fromkeys(lags, 0.0)
    for q, k, v in layers:
        off = kernel_model(q, k, v, scheme=FP4, causal=True) - exact_attention(q, k, v, causal=True)
        size = off.abs().mean(-1)
        size = size - size.mean(-1, keepdim=True)
        for name, lag in lags.items():
            product = (size[..., lag:] * size[..., :-lag]).mean() / size.square().mean()
            sums[name] += product.item() / len(layers)
    return {f"{name} ({lags[name]})": round(x, 4) for name, x in sums.items()}


def measure() -> dict:
    layers = load_layers()
    return {
        "tables": {**real_tables(layers), **synthetic_tables()},
        "autocorrelation of the error along queries, by lag": tile_pattern(layers),
    }


def show(results: dict, console: Console) -> None:
    for title, rows in results["tables"].items():
        table = Table("", "relative L1", "cosine", "worst layer", title=title)
        for name, e in rows.items():
            table.add_row(
                name,
                f"{e['rel_l1']:.4f}",
                f"{e['cosine']:.5f}",
                f"{e['worst_layer_rel_l1']:.4f}",
            )
        console.print(table)
    title = "autocorrelation of the error along queries, by lag"
    console.print(title, results[title])


RESULT = ROOT / "benchmarks" / "results" / "accuracy_fp4.json"
SOURCES = ("kernels/reference", "benchmarks/fp4_accuracy.py", "tests/data")

if __name__ == "__main__":
    run_on_cpu(__doc__, RESULT, measure, show, SOURCES)
