"""Attention inputs of the demo's video model, for tests and benchmarks on real tensors.

``.venv/bin/python demo capture`` writes tests/data/qkv_video.safetensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file

from ..nodes.engine.attach import clone_without_ours, set_override
from ..nodes.engine.call import read_call
from . import host, video
from .pack import ROOT
from .words import CATEGORIES

DATA = ROOT / "tests" / "data" / "qkv_video.safetensors"
PROMPT, SEED, STEPS = "red star circling over blue stripes", 0, 20
# Kind of block, its number, step, head: another head of another layer, early and late.
CAPTURED = (("double", 0, 4, 0), ("single", 1, 4, 1), ("single", 2, 15, 0))


def main() -> int:
    host.import_comfy()
    origin = {
        "source": "demo/model, licensed Apache-2.0; made by demo/capture.py",
        "prompt": PROMPT,
        "seed": str(SEED),
        "steps": str(STEPS),
    }
    save_file(capture(), DATA, metadata=origin)
    print(f"wrote {DATA.relative_to(ROOT)}")
    return 0


def capture() -> dict[str, torch.Tensor]:
    """``double.0.step4.q`` and so on: [1, 1, N, 128], FP16, after rotary embedding."""
    found: dict[str, torch.Tensor] = {}
    model, _ = clone_without_ours(video.load_model())

    def override(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        options = kwargs["transformer_options"]
        here = options.get("block_type"), options.get("block_index")
        step = int((options["sample_sigmas"] == options["sigmas"][0]).nonzero()[0])
        call = read_call(*args, **kwargs)
        for kind, number, wanted, head in CAPTURED:
            # Calls of the text's own blocks may carry a block's name too; they see words alone.
            if here == (kind, number) and step == wanted and call.q_len > len(CATEGORIES):
                for name, x in zip("qkv", (call.q, call.k, call.v), strict=True):
                    one = x[:, head : head + 1].half().contiguous().cpu()
                    found[f"{kind}.{number}.step{step}.{name}"] = one
        return func(*args, **kwargs)

    set_override(model, override)
    video.make_latent(model, PROMPT, SEED, STEPS)
    return found
