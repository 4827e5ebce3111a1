"""Measured errors of one model's layers, made by calibration and used to choose exceptions.

File: safetensors. Metadata key ``sageattention3_profile`` holds JSON (:data:`FORMAT`); tensors are
``errors.<precision>`` (float32 [layers], NaN where not measured) and ``fingerprint`` (float32).
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

TYPE = "SAGE3_PROFILE"  # in graphs
FORMAT = 1
_META = "sageattention3_profile"
_SAMPLED_WEIGHTS, _SAMPLES = 8, 32
# Loading weights as FP8 moves them by a few per cent, another model's are 140 % away.
_SAME_WEIGHTS = 0.3


class ProfileError(ValueError):
    """The profile can't be read, or is not of this model. The message says what to do."""


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
                f"the profile was measured on another model (a {self.family}): load that model, or "
                "calibrate this one"
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
        try:
            with safe_open(path, framework="pt") as file:
                head = json.loads((file.metadata() or {})[_META])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except KeyError:
            raise ProfileError(f"{path} is a safetensors file, but not a profile") from None
        except (OSError, SafetensorError, ValueError) as error:
            raise ProfileError(f"{path} can't be read ({error}): calibrate again") from error
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise ProfileError(
                f"{path} was written by another version of the pack: calibrate again"
            )
        try:
            return cls._parse(head, tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ProfileError(f"{path} is damaged ({error}): calibrate again") from error

    @classmethod
    def _parse(cls, head: dict, tensors: dict[str, torch.Tensor]) -> "Profile":
        samples = tensors.pop("fingerprint")
        errors = {}
        for name, row in tensors.items():
            pairs = zip(head["layers"], row.tolist(), strict=True)
            errors[name.removeprefix("errors.")] = {k: e for k, e in pairs if not math.isnan(e)}
        return cls(
            family=str(head["family"]),
            fingerprint=Fingerprint(str(head["shapes"]), samples),
            errors=errors,
            max_error=float(head["max_error"]),
            pack_version=str(head["pack_version"]),
        )
