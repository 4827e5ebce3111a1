"""The demo: the shipped workflows on tiny models, then clips of a trained one, in every precision.

Each workflow runs through a real ComfyUI server, once with the host's own attention, the yardstick,
and once per plan. What is left in ``output/demo``: the report and heat strip of every run,
``summary.json``, and the server's log. These models are tiny and random: the figures show that
everything is wired up right, not what a picture would lose. That is what the clips of ``gallery``
show, in ``output/demo/clips``.
"""

import contextlib
import json
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.torch import load

from ..kernels import metrics
from . import gallery, host, tiny
from .families import FAMILIES, Family
from .graph import REPORT_NODE, SMALL, Prompt, shrink, to_prompt
from .pack import ROOT
from .server import Progress as Steps
from .server import Server

OUTPUT = ROOT / "output" / "demo"
YARDSTICK = "fp16"
STEPS = 4
SIZES = {**SMALL, "width": 256, "height": 256, "steps": STEPS}

# Widgets of the Patch node. Emulation is on: without it a machine that lacks a native kernel would
# leave every call to the host.
EVERYWHERE = {"preset": "custom", "cross_attention": "same"}
PLANS: dict[str, dict[str, Any]] = {
    YARDSTICK: {**EVERYWHERE, "precision": "fp16"},
    "int8": {**EVERYWHERE, "precision": "int8"},
    "int8_fp4": {**EVERYWHERE, "precision": "int8_fp4"},
    "fp4": {**EVERYWHERE, "precision": "fp4"},
    # The first block, cross-attention and the first step in fp16.
    "mixed": {
        "preset": "custom",
        "precision": "fp4",
        "cross_attention": "fp16",
        "fp16_layers": "first 1",
        "start_percent": 0.2,
    },
}


@dataclass(frozen=True)
class Outcome:
    """One workflow under one plan. rel_l1: of the latent, against the host's own attention."""

    family: str
    plan: str
    calls: int
    quantised: int
    left_to_host: dict[str, int]  # reason -> calls
    rel_l1: float
    seconds: float


def main() -> int:
    """Run everything and print the table; 0, since whatever goes wrong raises."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    families = [family for family in FAMILIES.values() if family.workflow]
    console.print("[bold]SageAttention3 demo[/]: shipped workflows, tiny models, a real ComfyUI")
    with console.status("making tiny models"):
        _make_checkpoints(families)
    with contextlib.ExitStack() as stack:
        with console.status("starting ComfyUI"):
            server = stack.enter_context(Server(OUTPUT / "server.log"))
        outcomes = _run_all(server, families, console)
    summary = [asdict(outcome) for outcome in outcomes]
    (OUTPUT / "summary.json").write_text(json.dumps(summary, indent=1))
    console.print(_table(outcomes))
    calls = sum(outcome.calls for outcome in outcomes)
    console.print(
        f"{calls:,} attention calls, all accounted for: each plan of a model saw the same number. "
        "Rel. L1 is against the host's own attention."
    )
    with console.status("drawing clips") as status:
        figures = gallery.make(OUTPUT / "clips", lambda what: status.update(f"drawing {what}"))
    console.print(figures)
    console.print(
        "Clips of a small trained model against its own in fp16. Look at clips/clips.webp"
    )
    console.print("Clips, reports, heat strips, summary.json and the server's log are in")
    console.print(str(OUTPUT), style="bold", soft_wrap=True)
    return 0


def _make_checkpoints(families: Iterable[Family]) -> None:
    # Remarks of the host on libraries that the demo does without.
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Failed to load image Python extension")
    # The clips take a GPU where there is one. (The server keeps to the CPU.)
    host.import_comfy(cpu=not torch.cuda.is_available())
    for family in families:
        if family.from_file:
            tiny.checkpoint(family.name)


def _run_all(server: Server, families: list[Family], console: Console) -> list[Outcome]:
    object_info = server.object_info()
    outcomes = []
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for family in families:
            workflow = json.loads((ROOT / "workflows" / f"{family.workflow}.json").read_text())
            whole = to_prompt(workflow, object_info)
            task = progress.add_task(family.name, total=len(PLANS) * STEPS)
            yardstick = None
            for number, (plan, widgets) in enumerate(PLANS.items()):
                prompt = shrink(whole, family, object_info, SIZES, **widgets)

                def show(_node: str, step: int, _steps: int, done: int = number * STEPS) -> None:
                    progress.update(task, completed=done + step)  # noqa: B023 - called at once

                latent, outcome = _run_one(server, prompt, family, plan, yardstick, show)
                yardstick = latent if yardstick is None else yardstick
                outcomes.append(outcome)
            _check_calls(outcomes, family)
    return outcomes


def _run_one(
    server: Server,
    prompt: Prompt,
    family: Family,
    plan: str,
    yardstick: torch.Tensor | None,
    on_progress: Steps,
) -> tuple[torch.Tensor, Outcome]:
    started = time.monotonic()
    outputs = server.run(prompt, on_progress)["outputs"]
    seconds = time.monotonic() - started
    [report] = [outputs[i] for i, node in prompt.items() if node["class_type"] == REPORT_NODE]
    [saved] = [output["latents"][0] for output in outputs.values() if "latents" in output]
    latent = load(server.view(saved))["latent_tensor"]

    folder = OUTPUT / family.name
    folder.mkdir(exist_ok=True)
    (folder / f"{plan}.txt").write_text(report["text"][0] + "\n")
    (folder / f"{plan}.png").write_bytes(server.view(report["images"][0]))

    [rows] = report["ledger"]
    left: dict[str, int] = {}
    for row in rows:
        if row["backend"] == "host":
            left[row["reason"]] = left.get(row["reason"], 0) + row["calls"]
    calls = sum(row["calls"] for row in rows)
    rel_l1 = 0.0 if yardstick is None else metrics.compare(latent, yardstick).rel_l1
    outcome = Outcome(family.name, plan, calls, calls - sum(left.values()), left, rel_l1, seconds)
    return latent, outcome


def _check_calls(outcomes: Iterable[Outcome], family: Family) -> None:
    """Every plan must account for the calls that the model makes, whatever it does with them."""
    counts = {o.plan: o.calls for o in outcomes if o.family == family.name}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise AssertionError(f"{family.name}: ledgers disagree on the number of calls: {counts}")


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("model", "plan", "calls", "quantised", "left to the host: why", "rel. L1")
    for before, outcome in zip([None, *outcomes], outcomes, strict=False):
        new_family = before is None or before.family != outcome.family
        if new_family:
            table.add_section()
        table.add_row(
            outcome.family if new_family else "",
            outcome.plan,
            str(outcome.calls),
            str(outcome.quantised),
            "\n".join(f"{calls} {reason}" for reason, calls in outcome.left_to_host.items()),
            "" if outcome.plan == YARDSTICK else f"{outcome.rel_l1:.4f}",
        )
    return table
