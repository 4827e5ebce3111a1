"""Profiles made by hand, for tests that need no calibration."""

import torch
from sageattention3.nodes.engine.fingerprint import Fingerprint
from sageattention3.nodes.engine.measure import Predictors
from sageattention3.nodes.engine.profile import METRICS, Origin, Profile

NAN = float("nan")


def profile_of(
    errors,
    *,
    moved=1.0,
    seconds=None,
    sigmas=(1.0, 0.0),
    fingerprint=None,
    tokens=4096,
    family="flux",
    outliers=None,
):
    """errors: precision -> layer -> relative L1, one number or one per step; absent: not measured.

    seconds: precision -> layer -> of one call; all 1 if None. moved: as a number, or layer -> one.
    """
    layers = list(dict.fromkeys(layer for found in errors.values() for layer in found))
    steps = len(sigmas) - 1

    def table(found):
        rows = [found.get(layer, NAN) for layer in layers]
        rows = [row if isinstance(row, (list, tuple)) else [row] * steps for row in rows]
        return torch.tensor(rows, dtype=torch.float32)

    def row(found):
        return torch.tensor([found.get(layer, NAN) for layer in layers], dtype=torch.float32)

    if not isinstance(moved, dict):
        moved = dict.fromkeys(layers, moved)
    seconds = {"fp16": dict.fromkeys(layers, 1.0)} if seconds is None else seconds
    return Profile(
        origin=Origin(
            family, fingerprint or Fingerprint("00", torch.ones(3)), (16, 8, 8), "CPU", "0.1.0"
        ),
        layers=tuple(layers),
        sigmas=torch.tensor(sigmas, dtype=torch.float32),
        progress=torch.linspace(0, 1, steps + 1)[:-1],
        steps_done=steps,
        size=1.0,
        errors={p: {metric: table(found) for metric in METRICS} for p, found in errors.items()},
        moved=table(moved),
        predictors={name: table(outliers or {}) for name in Predictors._fields},
        seconds={p: row(found) for p, found in seconds.items()},
        calls=torch.ones(len(layers)),
        tokens=torch.full((len(layers), 2), float(tokens)),
    )
