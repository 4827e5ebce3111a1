"""The error metrics of this project, one definition for tests, benchmarks, profiles and reports."""

from typing import NamedTuple

import torch


class Errors(NamedTuple):
    """How far a tensor is from its reference. Cosine alone hides faults; read it beside rel_l1.

    cosine: of the flattened tensors. rel_l1: sum|a - b| / sum|b|. rmse: root mean square of a - b.
    worst_row_rel_l1: the largest relative L1 of any row (last dimension). finite: no NaN, no inf.
    """

    cosine: float
    rel_l1: float
    rmse: float
    worst_row_rel_l1: float
    finite: bool


def compare(out: torch.Tensor, ref: torch.Tensor) -> Errors:
    """Errors of ``out`` against ``ref`` of the same shape, computed in FP64.

    Where both are zero the relative errors are 0 and the cosine is 1. Raises ValueError on
    different or empty shapes: a broadcast comparison would mean nothing.
    """
    if out.shape != ref.shape or not out.numel():
        raise ValueError(f"cannot compare {list(out.shape)} with {list(ref.shape)}")
    out, ref = out.detach().double(), ref.detach().double()
    difference = (out - ref).abs()
    norms = out.norm() * ref.norm()
    both_zero = not out.any() and not ref.any()
    cosine = 1.0 if both_zero else ((out * ref).sum() / norms).nan_to_num(0.0).item()
    if out.ndim == 0:
        difference, ref = difference[None], ref[None]
    return Errors(
        cosine=cosine,
        rel_l1=_ratio(difference.sum(), ref.abs().sum()).item(),
        rmse=difference.square().mean().sqrt().item(),
        worst_row_rel_l1=_ratio(difference.sum(-1), ref.abs().sum(-1)).max().item(),
        finite=bool(torch.isfinite(out).all()),
    )


def _ratio(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """error / size; 0 where nothing is wrong, even if size is 0."""
    return torch.where(error == 0, 0.0, error / size)
