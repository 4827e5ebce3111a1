"""docs/results.md, the README and docs/training.md quote what benchmarks found, row by row."""

import json
import math
import re
from statistics import fmean, stdev

import pytest
from sageattention3.demo.pack import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def result_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


END_TO_END, TRAINED = result_of("end_to_end_h200"), result_of("trained_video")
FINE_TUNING = result_of("fine_tuning_h200")


def rows_of(page, first):
    """The other cells of each row, of any table, that begins with ``first``."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [row[1:] for row in rows if row[:1] == [first]]


@pytest.mark.parametrize("row", END_TO_END["workloads"], ids=lambda row: row["name"])
def test_seconds_a_step(row):
    host, patched = row["variants"]["host"], row["variants"]["balanced"]
    cells = [
        f"{row['tokens']:,}",
        f"{100 * host['attention_share']:.0f}%",
        f"{host['seconds']:.3f}",
        f"{patched['seconds']:.3f}",
        f"{patched['step_time']:.3f}",
        f"{row['least_step_time']:.3f}",
        f"x {patched['peak']:.3f}",
    ]
    assert cells in rows_of("results.md", row["name"])


@pytest.mark.parametrize("row", END_TO_END["workloads"], ids=lambda row: row["name"])
def test_no_call_was_lost_on_the_way(row):
    assert "sm90_int8" in row["variants"]["balanced"]["report"]
    assert row["bar"] is None or row["variants"]["balanced"]["step_time"] <= row["bar"]


@pytest.mark.parametrize("name", END_TO_END["projection"])
def test_a_projection_is_quoted_as_one(name):
    found = END_TO_END["projection"][name]
    assert [f"{row['speedup']:.2f}" for row in found] in rows_of("results.md", name)


def test_the_readme_quotes_whole_steps():
    text = (ROOT / "README.md").read_text("utf-8")
    quoted = re.search(r"(\d+)% of a\s+step with Wan 2.1.*?(\d+)% at Flux", text, re.S)
    times = {
        row["name"]: row["variants"]["balanced"]["step_time"] for row in END_TO_END["workloads"]
    }
    wanted = times["Wan 2.1 14B, 720p, 81 frames"], times["Flux-dev, 1024 px"]
    assert quoted.groups() == tuple(f"{100 * (1 - time):.0f}" for time in wanted)


@pytest.mark.parametrize("plan", TRAINED["plans"])
def test_what_pictures_lose(plan):
    row = TRAINED["plans"][plan]
    names = "psnr", "ssim", "flicker", "latent_rel_l1"
    means = [f"{row[name]['mean']:.4g} ± {row[name]['error']:.2g}" for name in names]
    blocks = [f"{error:.4f}" for error in TRAINED["rel_l1_after_each_block"][plan]]
    assert rows_of("results.md", plan) == [means, blocks]


def test_the_ranking_is_told_as_it_was_found():
    prompts = {plan: row["psnr_of_prompts"] for plan, row in TRAINED["plans"].items()}
    assert {len(found) for found in prompts.values()} == {16}
    ranking = sorted(prompts, key=lambda plan: fmean(prompts[plan]), reverse=True)
    assert ranking == ["int8", "fp4, worst 3 layers fp16", "int8_fp4", "fp4, P direct", "fp4"]
    gains = [x - y for x, y in zip(prompts["fp4, P direct"], prompts["fp4"], strict=True)]
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    assert f"{fmean(gains):.2f} ± {stdev(gains) / 4:.2f} dB better" in text


@pytest.mark.parametrize("layer", TRAINED["layers"])
def test_which_layers(layer):
    row = TRAINED["layers"][layer]
    found = [
        row[precision][name]
        for precision in ("fp4", "int8_fp4", "int8")
        for name in ("rel_l1", "latent_forecast")
    ]
    assert rows_of("results.md", layer) == [[f"{value:.3g}" for value in found]]


def test_layers_kept_in_fp16_pay():
    kept = ", ".join(f"`{layer}`" for layer in TRAINED["kept_in_fp16"])
    assert kept in (ROOT / "docs" / "results.md").read_text("utf-8")
    errors = {plan: row["latent_rel_l1"]["mean"] for plan, row in TRAINED["plans"].items()}
    assert errors["fp4, worst 3 layers fp16"] < 0.5 * errors["fp4"]


def runs(task, trained_with):
    return [
        row
        for row in FINE_TUNING["runs"]
        if (row["task"], row["trained_with"]) == (task, trained_with)
    ]


@pytest.mark.parametrize(
    ("task", "trained_with"),
    [
        ("untrained", "none"),
        *((task, name) for task in ("fine-tuning", "pretraining") for name in ("torch", "sagebwd")),
    ],
)
def test_a_language_model_fine_tuned(task, trained_with):
    rows = runs(task, trained_with)
    final = [row["final_loss"] for row in rows if "final_loss" in row]
    spread = f" ± {stdev(final):.4f}" if len(final) > 1 else ""
    first = f"{task}, {trained_with}" if final else task
    perplexities = [
        f"{math.exp(fmean(row['held_out_loss'][name] for row in rows)):.2f}"
        for name in ("torch", "int8", "fp4")
    ]
    mean = f"{fmean(final):.4f}{spread}" if final else ""
    assert rows_of("training.md", first) == [[mean, *perplexities]]


def test_sagebwd_ends_within_the_spread_of_seeds():
    plain, sagebwd = (
        [row["final_loss"] for row in runs("fine-tuning", name)] for name in ("torch", "sagebwd")
    )
    assert len(plain) == len(sagebwd) == 3
    assert abs(fmean(sagebwd) - fmean(plain)) < stdev(plain)
