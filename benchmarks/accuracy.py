"""Accuracy of every scheme and ablation of the reference algorithms on real attention inputs.

    python benchmarks/accuracy.py [--save]

Prints the counterparts of the SageAttention3 paper's tables 1, 6, 7 and 16, against FP64, on
tests/data/qkv_smollm2.safetensors, and some of the forward pass on qkv_video.safetensors too.
--save also writes benchmarks/results/accuracy_reference.json, from which docs/numerics.md quotes.
"""

from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

LAYERS = (1, 10, 20, 29)
GRADIENT_TOKENS = 512

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.provenance import ROOT, run_on_cpu  # noqa: E402
from sageattention3.kernels.metrics import Errors, compare  # noqa: E402
from sageattention3.kernels.reference import (  # noqa: E402
    SCHEMES,
    SageBwdOptions,
    Scheme,
    exact_attention,
    reference_attention,
    sagebwd_attention,
)
from sageattention3.kernels.reference.sagebwd import (  # noqa: E402
    PUBLISHED_FORWARD,
    TRAINING_FORWARD,
)

DATA = ROOT / "tests" / "data" / "qkv_smollm2.safetensors"
VIDEO_DATA = ROOT / "tests" / "data" / "qkv_video.safetensors"
RESULT = ROOT / "benchmarks" / "results" / "accuracy_reference.json"
PAPER = Scheme()
EXTRAS = {"scale_search": True, "smooth_v": True, "quantised_row_sum": True}
INT8_QK = Scheme(qk="int8", pv="exact", smooth_q=False)

FORWARD_TABLES: dict[str, dict[str, Scheme]] = {
    "FP4 format (table 1a)": {
        "NVFP4": PAPER,
        "MXFP4": replace(PAPER, qk="mxfp4", pv="mxfp4"),
    },
    "Scaling of P (table 1b)": {
        "two-level": PAPER,
        "direct": replace(PAPER, p_scaling="direct"),
    },
    "Smoothing (table 16)": {
        "none": replace(PAPER, smooth_q=False, smooth_k=False),
        "rotation only": replace(PAPER, smooth_q=False, smooth_k=False, rotate=True),
        "Q only": replace(PAPER, smooth_k=False),
        "K only": replace(PAPER, smooth_q=False),
        "Q and K (paper)": PAPER,
    },
    "Beyond the paper": {
        "paper": PAPER,
        "+ rotation": replace(PAPER, rotate=True),
        "+ scale search": replace(PAPER, scale_search=True),
        "+ scale search, V smoothing, quantised row sum": replace(PAPER, **EXTRAS),
        "+ balance and rotation (fp4)": SCHEMES["fp4"],
        "INT8 QK^T + FP4 PV, block scales": replace(PAPER, qk="int8", **EXTRAS),
        "INT8 QK^T + FP4 PV (int8_fp4)": SCHEMES["int8_fp4"],
    },
    "INT8 QK^T, PV exact": {
        "block scales": INT8_QK,
        "thread scales": replace(INT8_QK, qk_scale="thread"),
        "block scales, rotation": replace(INT8_QK, rotate=True),
        "thread scales, rotation": replace(INT8_QK, qk_scale="thread", rotate=True),
        "block scales, Q smoothing": replace(INT8_QK, smooth_q=True),
    },
    "8-bit PV, QK^T exact": {
        "P 0..255, V INT8 per channel": Scheme(qk="exact", pv="uint8"),
        "P 0..255, V INT8 per channel, V smoothing": Scheme(qk="exact", pv="uint8", smooth_v=True),
        "P 0..127, V INT8 per channel": Scheme(qk="exact", pv="int8"),
        "P 0..127, V INT8 per block": Scheme(qk="exact", pv="int8", v_scale="block"),
        "P and V in E4M3": Scheme(qk="exact", pv="e4m3"),
    },
    "INT8": {
        "int8": SCHEMES["int8"],
        "int8 without rotation": replace(SCHEMES["int8"], rotate=False),
        "int8 with block scales": replace(SCHEMES["int8"], qk_scale="block"),
        "int8 with Q smoothing": replace(SCHEMES["int8"], smooth_q=True),
    },
}

VIDEO_TABLE: dict[str, Scheme] = {
    "no smoothing": FORWARD_TABLES["Smoothing (table 16)"]["none"],
    "K smoothing only": FORWARD_TABLES["Smoothing (table 16)"]["K only"],
    "paper": PAPER,
    "MXFP4": FORWARD_TABLES["FP4 format (table 1a)"]["MXFP4"],
    "paper, P direct": FORWARD_TABLES["Scaling of P (table 1b)"]["direct"],
    **SCHEMES,
    "fp4, P direct": replace(SCHEMES["fp4"], p_scaling="direct"),
}

OUTLIER_TABLE: dict[str, Scheme] = {
    "fp4, neither balanced nor rotated": replace(SCHEMES["fp4"], balance=False, rotate=False),
    "fp4, rotated alone": replace(SCHEMES["fp4"], balance=False),
    "fp4, balanced alone": replace(SCHEMES["fp4"], rotate=False),
    "fp4": SCHEMES["fp4"],
    **{
        f"{name}, {'with' if rotate else 'without'} rotation": replace(SCHEMES[name], rotate=rotate)
        for name in ("int8_fp4", "int8")
        for rotate in (False, True)
    },
}

GRADIENT_TABLE: dict[str, SageBwdOptions] = {
    "SageBwd": SageBwdOptions(),
    "SageBwd, dO V^T quantised (table 1c)": SageBwdOptions(quantise_dov=True),
    "SageBwd, forward as published": SageBwdOptions(forward=PUBLISHED_FORWARD),
    "SageBwd, raw K": SageBwdOptions(forward=replace(TRAINING_FORWARD, smooth_k=False)),
    "FP8 forward and backward (tables 6, 7)": SageBwdOptions(
        forward=replace(PUBLISHED_FORWARD, qk="e4m3", pv="e4m3"), gemm="e4m3"
    ),
    "INT8 forward, FP8 backward": SageBwdOptions(gemm="e4m3"),
}


def load_layers() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(q, k, v) of each captured layer, FP32."""
    data = load_file(DATA)
    return [tuple(data[f"layer{i}.{x}"].float() for x in "qkv") for i in LAYERS]


def load_video_layers() -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(q, k, v) of each captured layer and step of the video model, FP32, by name."""
    data = load_file(VIDEO_DATA)
    names = dict.fromkeys(key.rpartition(".")[0] for key in data)
    return {name: tuple(data[f"{name}.{x}"].float() for x in "qkv") for name in names}


def forward_errors(layers, scheme: Scheme, causal: bool = True) -> list[Errors]:
    """Errors of the forward pass against FP64, one per layer."""
    return [
        compare(
            reference_attention(*qkv, scheme=scheme, causal=causal),
            exact_attention(*qkv, causal=causal),
        )
        for qkv in layers
    ]


def gradient_errors(layers, options: SageBwdOptions) -> dict[str, list[Errors]]:
    """Errors of O, dQ, dK and dV for a gaussian dO over the first tokens, one per layer each."""
    errors = {"O": [], "dQ": [], "dK": [], "dV": []}
    for seed, qkv in enumerate(layers):
        qkv = [x[:, :, :GRADIENT_TOKENS] for x in qkv]
        d_out = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(seed))
        mine = [x.clone().requires_grad_() for x in qkv]
        true = [x.double().requires_grad_() for x in qkv]
        out = sagebwd_attention(*mine, causal=True, options=options)
        ref = exact_attention(*true, causal=True)
        out.backward(d_out)
        ref.backward(d_out.double())
        errors["O"].append(compare(out, ref))
        for name, x, y in zip(("dQ", "dK", "dV"), mine, true, strict=True):
            errors[name].append(compare(x.grad, y.grad))
    return errors


def outlier_errors(scheme: Scheme) -> list[Errors]:
    """Gaussian inputs in which two zero-mean channels carry K (x30) and Q has them at 1/30."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 1024, 128, generator=generator) for _ in range(3))
    q[..., [3, 50]] /= 30
    k[..., [3, 50]] *= 30
    return [compare(reference_attention(q, k, v, scheme=scheme), exact_attention(q, k, v))]


def biased_gradient_errors(options: SageBwdOptions) -> list[Errors]:
    """Errors of dQ on gaussian inputs whose keys share a bias of 20."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 4, 512, 128, generator=generator) for _ in range(4))
    mine = q.clone().requires_grad_()
    true = q.double().requires_grad_()
    sagebwd_attention(mine, k + 20, v, options=options).backward(d_out)
    exact_attention(true, k + 20, v).backward(d_out.double())
    return [compare(mine.grad, true.grad)]


def summary(errors: list[Errors]) -> dict[str, float]:
    """Means over layers, and the worst layer."""
    return {
        "cosine": round(sum(e.cosine for e in errors) / len(errors), 5),
        "rel_l1": round(sum(e.rel_l1 for e in errors) / len(errors), 4),
        "rmse": float(f"{sum(e.rmse for e in errors) / len(errors):.3g}"),
        "worst_layer_rel_l1": round(max(e.rel_l1 for e in errors), 4),
    }


def measure() -> dict:
    layers = load_layers()
    forward = {
        title: {name: summary(forward_errors(layers, scheme)) for name, scheme in rows.items()}
        for title, rows in FORWARD_TABLES.items()
    }
    forward["Two zero-mean outlier channels of K"] = {
        name: summary(outlier_errors(scheme)) for name, scheme in OUTLIER_TABLE.items()
    }
    forward["dQ where K has a bias of 20"] = {
        name: summary(biased_gradient_errors(GRADIENT_TABLE[name]))
        for name in ("SageBwd", "SageBwd, raw K")
    }
    video = load_video_layers().values()
    forward["Video model"] = {
        name: summary(forward_errors(video, scheme, causal=False))
        for name, scheme in VIDEO_TABLE.items()
    }
    gradients = {
        name: {x: summary(errors) for x, errors in gradient_errors(layers, options).items()}
        for name, options in GRADIENT_TABLE.items()
    }
    return {"forward": forward, "gradients": gradients}


def show(results: dict, console: Console) -> None:
    for title, rows in results["forward"].items():
        table = Table("scheme", "relative L1", "cosine", "RMSE", "worst layer", title=title)
        for name, e in rows.items():
            table.add_row(
                name,
                f"{e['rel_l1']:.4f}",
                f"{e['cosine']:.5f}",
                f"{e['rmse']:.3g}",
                f"{e['worst_layer_rel_l1']:.4f}",
            )
        console.print(table)
    table = Table("SageBwd: cosine / relative L1", "O", "dQ", "dK", "dV", title="Gradients")
    for name, row in results["gradients"].items():
        table.add_row(name, *(f"{e['cosine']:.5f} / {e['rel_l1']:.4f}" for e in row.values()))
    console.print(table)


SOURCES = ("kernels/reference", "benchmarks/accuracy.py", "tests/data")

if __name__ == "__main__":
    run_on_cpu(__doc__, RESULT, measure, show, SOURCES)
