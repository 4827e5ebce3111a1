"""Tells one model's weights from another's, whatever precision they are loaded in."""

import hashlib
from dataclasses import dataclass

import torch

_SAMPLED_WEIGHTS, _SAMPLES = 8, 32
# Loading weights as FP8 moves them by a few per cent, another model's are 140 % away.
_SAME_WEIGHTS = 0.3


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """All names and shapes exactly, a few weights within rounding."""

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
