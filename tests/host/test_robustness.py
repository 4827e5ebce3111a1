"""A long session: a hundred graphs, edited at random between runs, leave nothing behind."""

import gc
import random
import tracemalloc
import weakref

import pytest
import torch
from sageattention3.demo import sampling, tiny
from sageattention3.demo.pack import ROOT
from sageattention3.demo.sampling import last_run, patched
from sageattention3.nodes.engine.override import find_session

pytestmark = [pytest.mark.host, pytest.mark.slow]

FAMILY = "hunyuan_video"  # text refiners, two kinds of blocks, a mask
PROMPTS = 100
KIB = 1024


@pytest.fixture(scope="module")
def model():
    return tiny.model(FAMILY)


def edited(draw: random.Random) -> dict:
    """Widgets as somebody who tries things out leaves them."""
    return {
        "preset": draw.choice(["balanced", "quality", "speed", "custom"]),
        "precision": draw.choice(["int8", "fp4", "int8_fp4", "fp16"]),
        "fp16_layers": draw.choice(["", "double.0", "first 1", "last 1", "single.*"]),
        "start_percent": draw.choice([0.0, 0.2]),
        "end_percent": draw.choice([0.8, 1.0]),
        "cross_attention": draw.choice(["fp16", "same"]),
        "min_tokens": draw.choice([0, 16, 10_000]),
        "emulation": draw.choice([True, True, False]),
        "enabled": draw.choice([True, True, True, False]),
    }


def bytes_of_ours() -> int:
    """What lines of the pack have allocated and nobody has freed.

    Not what the process holds: modules that torch imports late would count as a leak.
    """
    ours = [tracemalloc.Filter(True, f"{ROOT}/{folder}/*") for folder in ("nodes", "kernels")]
    traces = tracemalloc.take_snapshot().filter_traces(ours)
    return sum(trace.size for trace in traces.statistics("filename"))


def test_a_hundred_prompts_with_random_edits_leak_neither_memory_nor_state(model):
    draw = random.Random(8)
    with torch.inference_mode():
        plain = sampling.forward(model, FAMILY)
    sessions, counts, sizes = [], [], {}
    tracemalloc.start()
    try:
        for number in range(PROMPTS):
            changed = patched(model, **edited(draw))
            if draw.random() < 0.3:
                changed = patched(changed, **edited(draw))  # a second Patch behind the first
            sampling.sample(changed, FAMILY, steps=1, seed=number)
            session = find_session(changed)
            if session is not None:
                sessions.append(weakref.ref(session))
                counts.append(sum(row["calls"] for row in last_run(changed).rows()))
            del changed, session
            if number in (PROMPTS // 2, PROMPTS - 1):
                gc.collect()
                sizes[number] = bytes_of_ours()
    finally:
        tracemalloc.stop()
    assert len(sessions) > PROMPTS / 2
    assert len(set(counts)) == 1, "each run counts its own calls and no other's"
    alive = [ref() for ref in sessions if ref() is not None]
    assert len(alive) <= 1, "the host may keep the model of the last run"
    growth = sizes[PROMPTS - 1] - sizes[PROMPTS // 2]
    assert growth < 50 * KIB, f"{growth / KIB:.0f} KiB in {PROMPTS // 2} prompts"
    assert torch.equal(sampling.forward(model, FAMILY), plain)
