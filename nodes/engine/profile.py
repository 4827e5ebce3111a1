"""Measured errors of one model's layers, used to choose exceptions.

A calibration is to measure them. This version has none: it reads profiles and makes none.

File: safetensors. Metadata key ``sageattention3_profile`` holds JSON (:data:`FORMAT`); tensors are
``errors.<precision>`` (float32 [layers], NaN where not measured) and ``fingerprint`` (float32).
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ...kernels import PRECISIONS
from .words import shorten

TYPE = "SAGE3_PROFILE"  # in graphs
FORMAT = 1
_META = "sageattention3_profile"
_SAMPLED_WEIGHTS, _SAMPLES = 8, 32
# Loading weights as FP8 moves them by a few per cent, another model's are 140 % away.
_SAME_WEIGHTS = 0.3


class ProfileError(ValueError):
    """No profile, one that can't be read, or another model's. The message says what to do."""


def require_profile(value: object) -> "Profile":
    """``value`` as it came to a node's profile input. Raises ProfileError if it is no Profile."""
    if isinstance(value, Profile):
        return value
    raise ProfileError(
        f"profile is {shorten(repr(value))} ({type(value).__name__}), which is not a profile of "
        "measured errors. Leave the profile input unconnected: profiles come from the calibration, "
        "which this version does not have yet"
    )


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Tells models apart: all names and shapes exactly, a few weights within rounding."""

    shapes: str  # hex digest
    samples: torch.Tensor  # float32 [n]

    def matches(self, other: "Fingerprint") -> bool:
        if self.shapes != other.shapes or self.samples.shape != other.samples.shape:
            return False
        distance = torch.linalg.vector_norm(self.samples - other.samples)
        return bool(distance <= _SAME_WEIGHTS * torch.linalg.vector_norm(self.samples))


def fingerprint(model: object) -> Fingerprint:
    """The fingerprint of ``model`` (a ModelPatcher), as loaded, without merged LoRAs."""
    state = model.model.diffusion_model.state_dict()
    shapes = "\n".join(f"{name} {tuple(state[name].shape)}" for name in sorted(state))
    # Matrices, since many models share their norms' ones and zeros; evenly spread over the model.
    names = [n for n in sorted(state) if state[n].ndim > 1 and state[n].is_floating_point()]
    names = names[:: max(1, len(names) // _SAMPLED_WEIGHTS)][:_SAMPLED_WEIGHTS]
    samples = []
    for name in names:
        backup = model.backup.get(f"diffusion_model.{name}")
        weight = (backup.weight if backup is not None else state[name]).detach().flatten()
        samples.append(weight[:: max(1, len(weight) // _SAMPLES)][:_SAMPLES].float().cpu())
    return Fingerprint(
        hashlib.sha256(shapes.encode()).hexdigest(),
        torch.cat(samples) if samples else torch.zeros(0),
    )


@dataclass(frozen=True, eq=False)
class Profile:
    """Errors (relative L1 against fp16) per precision and layer id, and whose they are."""

    family: str
    fingerprint: Fingerprint
    errors: Mapping[str, Mapping[str, float]]  # precision -> layer id -> error
    max_error: float  # a layer above it should not run in that precision
    pack_version: str

    @property
    def layers(self) -> frozenset[str]:
        return frozenset(layer for errors in self.errors.values() for layer in errors)

    def exceptions(self, precision: str) -> frozenset[str]:
        """Layers whose error in ``precision`` is above max_error. Not measured: no exception."""
        errors = self.errors.get(precision, {})
        return frozenset(layer for layer, error in errors.items() if not error <= self.max_error)

    def check(self, model: object) -> None:
        """Raise ProfileError unless it was measured on ``model`` (a ModelPatcher)."""
        if not self.fingerprint.matches(fingerprint(model)):
            raise ProfileError(
                f"the profile was measured on another model (a {shorten(self.family)}): load that "
                "model, or disconnect the profile"
            )

    def save(self, path: str | Path) -> None:
        layers = sorted(self.layers)
        tensors = {"fingerprint": self.fingerprint.samples.contiguous()}
        for precision, errors in self.errors.items():
            row = [errors.get(layer, math.nan) for layer in layers]
            tensors[f"errors.{precision}"] = torch.tensor(row, dtype=torch.float32)
        head = {
            "format": FORMAT,
            "family": self.family,
            "shapes": self.fingerprint.shapes,
            "layers": layers,
            "max_error": self.max_error,
            "pack_version": self.pack_version,
        }
        save_file(tensors, path, metadata={_META: json.dumps(head)})

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read a profile. Raises ProfileError if ``path`` is not one, or is damaged."""
        if not isinstance(path, (str, os.PathLike)):
            raise ProfileError(f"{path!r} is not the path of a profile: choose a profile's file")
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
            return cls._parse(json.loads(text), tensors)
        except ProfileError as error:
            raise ProfileError(f"{path} {error}: use another copy, or none") from None
        except (ValueError, RecursionError) as error:  # of the JSON
            raise ProfileError(f"{path} is damaged ({error}): use another copy, or none") from None

    @classmethod
    def _parse(cls, head: object, tensors: dict[str, torch.Tensor]) -> "Profile":
        """The profile of a file's parts. Raises ProfileError with what is wrong with the file."""
        _require(isinstance(head, dict), "its header is no table")
        version = head.get("format")
        _require(type(version) is int, "its format is no number")  # True would pass for 1
        if version != FORMAT:
            raise ProfileError("was written by another version of the pack")
        for name in ("family", "shapes", "pack_version"):
            _require(isinstance(head.get(name), str), f"its {name} is no text")
        limit = head.get("max_error")
        _require(
            type(limit) in (int, float) and 0 <= limit < math.inf,
            "its max_error is no number from 0 up",
        )
        layers = head.get("layers")
        _require(
            isinstance(layers, list) and all(isinstance(layer, str) for layer in layers),
            "its layers are no list of names",
        )
        _require(len(set(layers)) == len(layers), "it names a layer twice")
        samples = tensors.get("fingerprint")
        _require(
            samples is not None and _is_row(samples) and bool(samples.isfinite().all()),
            "its fingerprint is no row of numbers",
        )
        errors = {}
        for name, row in tensors.items():
            if name == "fingerprint":
                continue
            precision = name.removeprefix("errors.")
            _require(
                name != precision and precision in PRECISIONS, f"it has a tensor {shorten(name)}"
            )
            _require(_is_row(row) and len(row) == len(layers), f"{name} has not one number a layer")
            _require(not bool((row < 0).any()), f"{name} has a negative error")
            pairs = zip(layers, row.tolist(), strict=True)
            errors[precision] = {k: e for k, e in pairs if not math.isnan(e)}
        return cls(
            family=head["family"],
            fingerprint=Fingerprint(head["shapes"], samples),
            errors=errors,
            max_error=float(limit),
            pack_version=head["pack_version"],
        )


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise ProfileError(f"is damaged ({fault})")


def _is_row(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 1 and tensor.dtype == torch.float32
