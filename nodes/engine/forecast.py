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
    """``moved`` [L, S], its NaN filled by the product of a factor per group and one per step."""
    # Layers of a group have one row in common. -1, since np.unique tells NaN from NaN.
    groups, group_of = np.unique(np.nan_to_num(moved, nan=-1.0), axis=0, return_inverse=True)
    known = groups > 0
    if not known.any():
        raise ProfileError(
            "the profile does not say how far errors move the latent, because its calibration was "
            "too short: calibrate with more steps"
        )
    count, steps = groups.shape
    rows, columns = np.nonzero(known)
    equations = np.arange(len(rows))
    measured = np.zeros((len(rows), count + steps))
    measured[equations, rows] = measured[equations, count + columns] = 1
    step = np.eye(steps)
    smooth = np.concatenate([_STRAIGHT * np.diff(step, 2, axis=0), _FLAT * np.diff(step, axis=0)])
    smooth = np.hstack([np.zeros((len(smooth), count)), smooth])
    values = np.concatenate([np.log(groups[known]), np.zeros(len(smooth))])
    factors = np.linalg.lstsq(np.concatenate([measured, smooth]), values, rcond=None)[0]
    by_group, by_step = factors[:count], factors[count:]
    seen = known.any(1)
    # A group that was never asked about weighs as much as any that was.
    by_group = np.where(seen, by_group, by_group[seen].max())
    filled = np.where(known, groups, np.exp(by_group[:, None] + by_step))
    return filled[group_of.reshape(-1)]


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
