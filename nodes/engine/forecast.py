"""How far the final latent will be from full precision's, foretold from a profile.

An error e (relative L1) in one layer's attention at step i moves the denoised latent by
``moved * e``, and the sampler's step from sigma_i to sigma_i+1 passes the share
``1 - sigma_i+1 / sigma_i`` of that on to the end. Errors of one layer are alike from step to step
and add up; errors of different layers are independent and add up in squares::

    E = sqrt(sum over layers (sum over steps share * moved * e)^2) / size

Cells that were not measured are read off the layer's measured steps between which they lie.
"""

import numpy as np
import torch

from .profile import Profile, ProfileError

# Measured latents of tiny models of 16 families were up to 1.25 times as far away as E says, since
# neither assumption holds to the letter.
MARGIN = 1.25


def contributions(profile: Profile, precision: str) -> np.ndarray:
    """[L, S]: what each layer adds to the forecast by running in ``precision`` at each step.

    A forecast is ``sqrt(square(contributions.sum(steps)).sum(layers))``. Layers that were never
    measured in ``precision``, or gave no number, are infinite.
    """
    if precision == "fp16":
        return np.zeros((len(profile.layers), profile.steps))
    moved = _filled(profile.moved)
    if np.isnan(moved).all():
        raise ProfileError(
            "the profile does not say how far errors move the latent, because its calibration was "
            "too short: calibrate with more steps"
        )
    # Layers of a group that was not asked about weigh as much as any that was.
    moved = np.where(np.isnan(moved), np.nanmax(moved, axis=0, keepdims=True), moved)
    if precision not in profile.errors:
        return np.full_like(moved, np.inf)
    errors = np.nan_to_num(_filled(profile.errors[precision]["rel_l1"]), nan=np.inf)
    sigmas = profile.sigmas.numpy().astype(float)
    shares = 1 - sigmas[1:] / np.where(sigmas[:-1] == 0, np.inf, sigmas[:-1])
    with np.errstate(invalid="ignore"):  # 0 * inf
        added = MARGIN / profile.size * shares * moved * errors
    return np.where(np.isnan(added), np.inf, added)


def _filled(table: torch.Tensor) -> np.ndarray:
    """``table`` [L, S] with its NaN interpolated along the steps; a row of NaN stays one."""
    filled = table.numpy().astype(float)
    steps = np.arange(filled.shape[1])
    for row in filled:
        known = ~np.isnan(row)
        if np.isinf(row).any():
            row[:] = np.inf
        elif known.any():
            row[:] = np.interp(steps, steps[known], row[known])
    return filled
