"""How much faster a step of sampling gets: real models, at their size, in a real ComfyUI.

    python benchmarks/end_to_end.py [--only TEXT ...] [--presets NAME ...] [--out FOLDER]
                                    [--commit HASH]

Builds the models of full_size.py from the host's own classes, with random weights, and lets the
host's sampler run them: with the host's attention, with SageAttention if that is installed, and as
SageAttention3 Patch leaves them. The first step of each run is not timed but looked into.
--only: workloads whose name holds TEXT. --out writes end_to_end.json and end_to_end.png there.
"""

import argparse
import gc
import importlib.util
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.end_to_end_chart import plot
from sageattention3.benchmarks.full_size import WORKLOADS, Workload
from sageattention3.benchmarks.projection import project
from sageattention3.benchmarks.provenance import (
    ROOT,
    add_gpu_options,
    gpu_provenance,
    require_gpu,
    write_result,
)
from sageattention3.benchmarks.step_clock import GpuMeter, StepClock
from sageattention3.demo import host, tiny
from sageattention3.demo.families import FAMILIES
from sageattention3.demo.sampling import last_run, sample
from sageattention3.kernels.metrics import compare
from sageattention3.nodes.engine.attach import set_override
from sageattention3.nodes.engine.plan import PRESETS
from sageattention3.nodes.engine.summary import describe_run
from sageattention3.nodes.patch import SageAttention3Patch
from sageattention3.nodes.widgets import PLAN_WIDGETS

HOST, PEER = "host", "sageattention"
WIDGETS = {name: options["default"] for name, (_, options) in PLAN_WIDGETS.items()}
SOURCES = (
    "kernels",
    "nodes",
    *(f"benchmarks/{name}.py" for name in ("end_to_end", "full_size", "projection", "step_clock")),
)
# So small that the GPU waits for Python, and just long enough to be quantised.
SMALL = Workload("overhead", replace(FAMILIES["flux"], latent=(16, 64, 64)), steps=20)
GIB = 1 << 30

Variants = dict[str, Callable[[Any], Any]]  # name -> makes a MODEL of the plain one


def variants(presets: Iterable[str]) -> Variants:
    """What takes part, the host's own attention first."""
    found: Variants = {HOST: lambda model: model}
    if importlib.util.find_spec("sageattention"):
        found[PEER] = _with_sage_attention
    for name in presets:
        found[name] = lambda model, preset=name: _patched(model, preset)
    return found


def _patched(model: Any, preset: str) -> Any:
    """``model`` as the patch node leaves it, its other widgets as they come."""
    (model,) = SageAttention3Patch().patch(model, **{**WIDGETS, "preset": preset})["result"]
    return model


def _with_sage_attention(model: Any) -> Any:
    """``model`` as it runs in a host that was started with --use-sage-attention."""
    from comfy.ldm.modules.attention import attention_sage

    model = model.clone()
    model.model_options.setdefault("transformer_options", {})
    set_override(model, lambda _func, *args, **kwargs: attention_sage(*args, **kwargs))
    return model


def build(workload: Workload, device: str, dtype: torch.dtype) -> Any:
    """The workload's ModelPatcher, its weights on ``device`` from the start and to stay there."""
    import comfy.model_patcher

    model = tiny.build(workload.family, tiny.SEED, device, dtype).to(device)
    place = torch.device(device)
    return comfy.model_patcher.ModelPatcher(model, load_device=place, offload_device=place)


def sample_clocked(workload: Workload, model: Any, clock: StepClock) -> torch.Tensor:
    """The latent that the host's sampler makes with ``model``."""
    family = workload.family
    with clock.running(model):
        return sample(
            clock.on(model),
            family.name,
            steps=workload.steps + 1,
            cfg=workload.cfg,
            latent=family.latent,
            positive=tiny.random_conditioning(family.text, 1),
            negative=tiny.random_conditioning(family.text, 2),
            callback=clock.stepped,
        )


def run(workload: Workload, model: Any, meter: Any) -> tuple[dict[str, Any], torch.Tensor, dict]:
    """What one run of ``model`` took, the latent that it made, and what its steps consist of."""
    clock = StepClock(meter)
    meter.forget_peak()
    latent = sample_clocked(workload, model, clock)
    seconds = statistics.median(clock.steps)
    attention = statistics.median(clock.attention)
    taken = {
        "seconds": seconds,
        "steps": clock.steps,
        "attention_seconds": attention,
        "attention_share": attention / seconds,
        "peak_bytes": meter.peak_bytes(),
        "kernel_seconds": clock.by_kind(),
        "longest_kernels": dict(sorted(clock.kernels.items(), key=lambda k: -k[1])[:12]),
    }
    step = {
        "tokens": clock.tokens,
        "head_dim": clock.head_dim,
        "attention_calls": clock.calls,
        "attention_flops": clock.attention_flops,
        "linear_flops": clock.linear_flops,
    }
    return taken, latent, step


def measure(workload: Workload, model: Any, found: Variants, meter: Any) -> dict[str, Any]:
    """``workload`` with each of the variants; the first is what the others are compared with."""
    parameters = list(model.model.diffusion_model.parameters())
    row = {
        "name": workload.name,
        "parameters": sum(p.numel() for p in parameters),
        "weight_bytes": sum(p.nbytes for p in parameters),
        "latent": list(workload.family.latent),
        "cfg": workload.cfg,
        "bar": workload.bar,
        "variants": {},
    }
    plain = None
    for name, make in found.items():
        made = make(model)
        taken, latent, step = run(workload, made, meter)
        if plain is None:
            plain, first = latent, taken
            row |= step
            row["other_seconds"] = list(taken["kernel_seconds"].values())[-1]
            row["least_step_time"] = 1 - taken["attention_share"]  # Amdahl: attention for nothing
        else:
            taken["step_time"] = taken["seconds"] / first["seconds"]
            taken["peak"] = taken["peak_bytes"] / first["peak_bytes"]
            taken["latent_error"] = compare(latent, plain).rel_l1
        if name not in (HOST, PEER):
            taken["report"] = describe_run(last_run(made))
        row["variants"][name] = taken
    return row


def measure_all(
    workloads: Iterable[Workload], found: Variants, meter: Any, **place: Any
) -> Iterator[dict[str, Any]]:
    """A row of each workload. place: device and dtype of the models; one at a time is held."""
    import comfy.model_management

    model, built = None, None
    for workload in workloads:
        if built != workload.family.config:
            comfy.model_management.unload_all_models()
            model = None
            gc.collect()
            model, built = build(workload, **place), workload.family.config
        yield measure(workload, model, found, meter)


def overhead(preset: str, meter: Any, **place: Any) -> dict[str, float]:
    """CPU microseconds of an attention call that no GPU work holds up: the host's, and ours."""
    model = build(SMALL, **place)
    taken = {}
    for name, make in variants([preset]).items():
        clock = StepClock(meter, profiled=False)
        sample_clocked(SMALL, make(model), clock)
        taken[name] = statistics.median(clock.enqueue) * 1e6
    return taken


def projections(rows: Iterable[dict]) -> dict[str, list[dict]]:
    """Of each workload, from the committed figures of single kernels."""
    results = ROOT / "benchmarks" / "results"
    calls = json.loads((results / "attention_h200.json").read_text("utf-8"))["calls"]
    loops = json.loads((results / "fp4_speed_model.json").read_text("utf-8"))["loops"]
    return {row["name"]: project(row, calls, loops) for row in rows}


def show(results: dict[str, Any], console: Console) -> None:
    columns = ("s/step", "step time", "bar", "attention", "peak GiB", "peak", "latent error")
    table = Table("workload", "attention by", *columns, title="End to end")
    for row in results["workloads"]:
        for name, taken in row["variants"].items():
            ours = "step_time" in taken
            table.add_row(
                f"{row['name']}, {row['tokens']} tokens" if name == HOST else "",
                name,
                f"{taken['seconds']:.3f}",
                f"{taken['step_time']:.3f}" if ours else f"at best {row['least_step_time']:.3f}",
                f"{row['bar']:.2f}" if ours and row["bar"] else "",
                f"{taken['attention_share']:.0%}",
                f"{taken['peak_bytes'] / GIB:.1f}",
                f"{taken['peak']:.3f}" if ours else "",
                f"{taken['latent_error']:.4f}" if ours else "",
            )
    console.print(table)
    times = "; ".join(f"{name} {us:.1f} us" for name, us in results["enqueue_microseconds"].items())
    console.print(f"CPU time of an attention call in a model: {times}")
    table = Table("workload", "GPU", "precision", "gain", title="Projection, not measured")
    for name, rows in results["projection"].items():
        for row in rows:
            table.add_row(name, row["gpu"], row["precision"], f"{row['speedup']:.2f}x")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="workloads of such a name")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["balanced"])
    add_gpu_options(parser, "end_to_end.json and end_to_end.png")
    options = parser.parse_args()
    chosen = [w for w in WORKLOADS if not options.only or any(t in w.name for t in options.only)]
    if not chosen:
        parser.error(f"no workload is called so: {', '.join(w.name for w in WORKLOADS)}")
    require_gpu(parser)
    host.import_comfy(cpu=False)
    meter, place = GpuMeter(), {"device": "cuda", "dtype": torch.bfloat16}
    results = {
        **gpu_provenance(options.commit, *SOURCES),
        # Before anything is profiled.
        "enqueue_microseconds": overhead(options.presets[0], meter, **place),
        "workloads": [],
    }
    for row in measure_all(chosen, variants(options.presets), meter, **place):
        results["workloads"].append(row)
        results["projection"] = projections(results["workloads"])
        if options.out:  # after each: a run that breaks off has not been for nothing
            write_result(options.out / "end_to_end.json", results)
    show(results, Console(width=140))
    if options.out:
        plot(results, options.out / "end_to_end.png")


if __name__ == "__main__":
    main()
