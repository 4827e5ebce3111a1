"""Profiles as files: safetensors, whose metadata key ``sageattention3_profile`` holds JSON.

Tensors, all float32: ``fingerprint`` [n]; ``sigmas`` [S + 1]; ``progress`` [S]; ``moved`` [L, S];
``calls`` [L]; ``tokens`` [L, 2]; ``<metric>.<precision>`` and ``predictors.<name>`` [L, S];
``seconds.<precision>`` [L]. JSON: what is no tensor. Nothing in it belongs to one machine.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ...kernels import PRECISIONS
from .fingerprint import Fingerprint
from .measure import Predictors
from .profile import METRICS, Origin, Profile, ProfileError
from .words import shorten

FORMAT = 2
_META = "sageattention3_profile"


def save(profile: Profile, path: Path) -> None:
    """Write ``profile``, whole or not at all."""
    tensors = {
        "fingerprint": profile.origin.fingerprint.samples,
        "sigmas": profile.sigmas,
        "progress": profile.progress,
        "moved": profile.moved,
        "calls": profile.calls,
        "tokens": profile.tokens,
        **{
            f"{metric}.{precision}": table
            for precision, metrics in profile.errors.items()
            for metric, table in metrics.items()
        },
        **{f"predictors.{name}": table for name, table in profile.predictors.items()},
        **{f"seconds.{precision}": row for precision, row in profile.seconds.items()},
    }
    origin = profile.origin
    head = {
        "format": FORMAT,
        "family": origin.family,
        "shapes": origin.fingerprint.shapes,
        "latent": list(origin.shape),
        "gpu": origin.gpu,
        "pack_version": origin.pack_version,
        "layers": list(profile.layers),
        "steps_done": profile.steps_done,
        "size": profile.size,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, partial, metadata={_META: json.dumps(head)})
    os.replace(partial, path)


def load(path: Path) -> Profile:
    """Read a profile. Raises ProfileError if ``path`` is not one, or is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_META)
            if text is None:
                raise ProfileError(
                    f"{path} is a safetensors file, but not a profile: choose a profile's file"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except ProfileError:
        raise
    except FileNotFoundError:
        raise ProfileError(f"there is no file {path}: choose a profile's file") from None
    except Exception as error:  # safetensors lets through whatever its parts raise
        raise ProfileError(
            f"{path} can't be read ({error}): it is no profile, or an incomplete one"
        ) from error
    try:
        return _parse(json.loads(text), tensors)
    except ProfileError as error:
        raise ProfileError(f"{path} {error}: calibrate again, or use another copy") from None
    except (ValueError, RecursionError) as error:  # of the JSON
        raise ProfileError(
            f"{path} is damaged ({error}): calibrate again, or use another copy"
        ) from None


def _parse(head: Any, tensors: dict[str, torch.Tensor]) -> Profile:
    """The profile of a file's parts. Raises ProfileError with what is wrong with the file."""
    _require(isinstance(head, dict), "its header is no table")
    version = head.get("format")
    _require(type(version) is int, "its format is no number")  # True would pass for 1
    if version != FORMAT:
        raise ProfileError("was written by another version of the pack")
    for name in ("family", "shapes", "gpu", "pack_version"):
        _require(isinstance(head.get(name), str), f"its {name} is no text")
    layers = head.get("layers")
    _require(
        isinstance(layers, list) and layers and all(isinstance(layer, str) for layer in layers),
        "its layers are no list of names",
    )
    _require(len(set(layers)) == len(layers), "it names a layer twice")
    latent = head.get("latent")
    _require(
        isinstance(latent, list) and all(type(n) is int and n > 0 for n in latent),
        "its latent is no shape",
    )
    size = head.get("size")
    _require(type(size) in (int, float) and 0 < size < math.inf, "its size is no positive number")

    sigmas = tensors.get("sigmas")
    _require(sigmas is not None and sigmas.ndim == 1 and len(sigmas) > 1, "it has no sigmas")
    take = _Taker(tensors, steps=len(sigmas) - 1, layers=len(layers))
    steps_done = head.get("steps_done")
    _require(type(steps_done) is int and 0 < steps_done <= take.steps, "its steps_done is no step")
    profile = Profile(
        origin=Origin(
            family=head["family"],
            fingerprint=Fingerprint(head["shapes"], take.row("fingerprint", None, finite=True)),
            shape=tuple(latent),
            gpu=head["gpu"],
            pack_version=head["pack_version"],
        ),
        layers=tuple(layers),
        sigmas=take.row("sigmas", take.steps + 1, finite=True),
        progress=take.row("progress", take.steps, finite=True),
        steps_done=steps_done,
        size=float(size),
        errors=take.errors(),
        moved=take.table("moved"),
        predictors={name: take.table(f"predictors.{name}") for name in Predictors._fields},
        seconds=take.seconds(),
        calls=take.counts("calls", (take.layers,)),
        tokens=take.counts("tokens", (take.layers, 2)),
    )
    _require(not take.left, f"it has a tensor {shorten(next(iter(take.left), ''))}")
    return profile


class _Taker:
    """Takes tensors of a file one by one, each checked; what nobody asked for is left."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], steps: int, layers: int) -> None:
        self.left = dict(tensors)
        self.steps, self.layers = steps, layers

    def take(self, name: str, shape: tuple[int, ...] | None) -> torch.Tensor:
        tensor = self.left.pop(name, None)
        _require(tensor is not None, f"it has no {name}")
        fits = tensor.dtype == torch.float32 and (shape is None or tuple(tensor.shape) == shape)
        _require(fits, f"{name} has another shape or type than it should")
        return tensor

    def row(self, name: str, length: int | None, *, finite: bool = False) -> torch.Tensor:
        row = self.take(name, None if length is None else (length,))
        _require(row.ndim == 1, f"{name} is no row of numbers")
        _require(not finite or bool(row.isfinite().all()), f"{name} holds what is no number")
        return row

    def table(self, name: str, *, signed: bool = False) -> torch.Tensor:
        table = self.take(name, (self.layers, self.steps))
        _require(signed or not bool((table < 0).any()), f"{name} has a negative value")
        return table

    def counts(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        counts = self.take(name, shape)
        _require(bool((counts.isfinite() & (counts >= 0)).all()), f"{name} holds what is no count")
        return counts

    def errors(self) -> dict[str, dict[str, torch.Tensor]]:
        found = [p for p in PRECISIONS if f"{METRICS[0]}.{p}" in self.left]
        _require(bool(found), "it holds no errors")
        return {
            precision: {
                metric: self.table(f"{metric}.{precision}", signed=metric == "cosine")
                for metric in METRICS
            }
            for precision in found
        }

    def seconds(self) -> dict[str, torch.Tensor]:
        rows = {
            p: self.row(f"seconds.{p}", self.layers)
            for p in PRECISIONS
            if f"seconds.{p}" in self.left
        }
        for precision, row in rows.items():
            _require(not bool((row <= 0).any()), f"seconds.{precision} has a value of 0 or less")
        return rows


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise ProfileError(f"is damaged ({fault})")
