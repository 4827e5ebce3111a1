"""What the step times of end_to_end.py could be on GPUs that nobody has measured: a projection.

Taken from measurements on the H200: operations of a step, the time of its kernels that do neither
products nor attention, and how many times as fast as FlashAttention-2 the INT8 kernel of all GPUs
is. Taken from NVIDIA's data sheets: peak rates. Assumed: matrix products and FlashAttention-2 reach
the peak for FP16 with FP32 sums, as published for both; other kernels are bound by memory; the
model fits. FP4 has never run: its rate is the lower bound of fp4_speed_model.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MEASURED_BANDWIDTH = 4.8  # of the H200, TB/s
RTX_5090 = "RTX 5090"


class Gpu(NamedTuple):
    """Dense TFLOPS for FP16 with FP32 sums, and TB/s: NVIDIA's white papers."""

    name: str
    tflops: float
    bandwidth: float


GPUS = (Gpu("RTX 4090", 165.2, 1.008), Gpu(RTX_5090, 209.5, 1.792))


def int8_gain(calls: Sequence[Mapping[str, Any]], tokens: int, head_dim: int) -> float:
    """How many times as fast as FlashAttention-2: of the measured call nearest in length.

    calls: those of benchmarks/results/attention_h200.json.
    """
    alike = [c for c in calls if c["head_dim"] == head_dim and not c["causal"]]
    nearest = min(alike, key=lambda c: max(c["tokens"] / tokens, tokens / c["tokens"]))
    taken = nearest["milliseconds"]
    return taken["torch flash"] / taken["int8 (sm80_int8)"]


def project(
    row: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], fp4_loops: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Seconds of a step of ``row`` (a workload of end_to_end.json), per GPU and precision.

    fp4_loops: those of benchmarks/results/fp4_speed_model.json.
    """
    found = []
    for gpu in GPUS:
        rest = row["linear_flops"] / gpu.tflops / 1e12
        rest += row["other_seconds"] * MEASURED_BANDWIDTH / gpu.bandwidth
        host = row["attention_flops"] / gpu.tflops / 1e12
        attention = {"int8": host / int8_gain(calls, row["tokens"], row["head_dim"])}
        if gpu.name == RTX_5090:
            tops = fp4_loops[f"{row['head_dim']} channels, Q smoothed"]["serial"]
            attention["fp4"] = row["attention_flops"] / tops / 1e12
        for precision, taken in attention.items():
            found.append(
                {
                    "gpu": gpu.name,
                    "precision": precision,
                    "host_seconds": host + rest,
                    "seconds": taken + rest,
                    "speedup": (host + rest) / (taken + rest),
                }
            )
    return found
