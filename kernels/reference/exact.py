"""Plain attention in FP64: what every error in this project is measured against."""

import torch

ROWS = 512  # queries at a time, which bounds the memory of their scores


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """softmax(scale Q K^T + mask) V in FP64, differentiable; arguments as in reference_attention.

    A row that sees nothing gives zeros.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    out = []
    for start in range(0, q.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        scores = q[:, :, rows] @ k.mT * scale
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask[:, :, rows], -torch.inf)
        elif mask is not None:
            scores = scores + mask[:, :, rows]
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(future.triu(start + 1), -torch.inf)
        sees_nothing = (scores == -torch.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(sees_nothing, 0.0)  # a softmax of -inf alone would be NaN
        out.append(scores.softmax(-1).masked_fill(sees_nothing, 0.0) @ v)
    return torch.cat(out, 2)
