"""How far the final latent will be from full precision's, foretold from a profile.

An error e (relative L1) in one layer's attention at step i moves the denoised latent by
``moved * e``, and the sampler's step from sigma_i to sigma_i+1 passes the share
``1 - sigma_i+1 / sigma_i`` of that on to the end. Errors of one layer are alike from step to step
and add up; errors of different layers are independent and add up in squares::

    E = sqrt(sum over layers (sum over steps share * moved * e)^2) / size

Errors change slowly: where none was measured, they are interpolated between the layer's own. What
moves the latent may fall a hundredfold within a few steps, and each group of layers is asked about
at a few steps only: it is taken for a factor of the group times a factor of the step, whose
logarithm bends little from step to step.
"""

import numpy as np
import torch

from .profile import Profile, ProfileError

# Neither assumption holds to the letter. With this, no latent of a tiny model was measured further
# away than foretold, and most a good deal less (benchmarks/forecast.py).
MARGIN = 1.2
# Weights of the second and of the first differences of a step's logarithm, beside measurements of
# weight 1: between measurements it goes straight, beyond them it levels off.
_STRAIGHT, _FLAT = 0.3, 0.03


def contributions(profile: Profile, precision: str) -> np.ndarray:
    """[L, S]: what each layer adds to the forecast by running in ``precision`` at each step.

    A forecast is ``sqrt(square(contributions.sum(steps)).sum(layers))``. Layers that were never
    measured in ``precision``, or gave no number, are infinite.
    """
    if precision == "fp16":
        return np.zeros((len(profile.layers), profile.steps))
    moved = _fit_moved(profile.moved.numpy().astype(float))
    if precision not in profile.errors:
        return np.full_like(moved, np.inf)
    errors = _filled(profile.errors[precision]["rel_l1"])
    sigmas = profile.sigmas.numpy().astype(float)
    shares = 1 - sigmas[1:] / np.where(sigmas[:-1] == 0, np.inf, sigmas[:-1])
    with np.errstate(invalid="ignore"):  # 0 * infinity
        added = MARGIN / profile.size * shares * moved * errors
    return np.where(np.isnan(added), np.inf, added)


def _fit_moved(moved: np.ndarray) -> np.ndarray:
    """``moved`` [L, S] with its NaN filled by the product of a factor per row and one per step."""
    known = np.isfinite(moved) & (moved > 0)
    if not known.any():
        raise ProfileError(
            "the profile does not say how far errors move the latent, because its calibration was "
            "too short: calibrate with more steps"
        )
    layers, steps = moved.shape
    rows, columns = np.nonzero(known)
    measured = np.zeros((len(rows), layers + steps))
    measured[np.arange(len(rows)), rows] = measured[np.arange(len(rows)), layers + columns] = 1
    smooth = [_STRAIGHT * np.diff(np.eye(steps), 2, axis=0), _FLAT * np.diff(np.eye(steps), axis=0)]
    smooth = np.concatenate(smooth)
    equations = np.block([[measured], [np.zeros((len(smooth), layers)), smooth]])
    values = np.concatenate([np.log(moved[known]), np.zeros(len(smooth))])
    factors = np.linalg.lstsq(equations, values, rcond=None)[0]
    by_layer, by_step = factors[:layers], factors[layers:]
    seen = known.any(1)
    # Layers of a group that was never asked about weigh as much as any that was.
    by_layer = np.where(seen, by_layer, by_layer[seen].max())
    return np.where(known, moved, np.exp(by_layer[:, None] + by_step))


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
