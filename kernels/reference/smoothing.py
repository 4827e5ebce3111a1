"""Exact rewritings that leave attention as it is and make its operands easier to quantise.

Softmax ignores a constant added to a row of scores, so K may lose its token mean; rows of P sum to
one, so V may too, if the mean is added back to O; Q may lose a mean per block if that mean's scores
are added back (SageAttention3 paper, section 3.1); and Q K^T is unchanged when one orthonormal
matrix rotates both.
"""

import functools

import torch

from .formats import pad_to_multiple


def token_mean(x: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """Mean over tokens of ``x`` [..., N, D] (FP32) as [..., 1, D].

    live: bool [..., N, 1], the tokens that count; the others are zeros in x. None: all count.
    """
    count = x.shape[-2] if live is None else live.sum(-2, keepdim=True).clamp_min(1)
    # Dividing first keeps sums of values near FP32's maximum (possible in BF16) finite.
    return (x / count).sum(-2, keepdim=True)


def block_mean(x: torch.Tensor, block: int) -> torch.Tensor:
    """Means over blocks of ``block`` tokens of ``x`` [..., N, D] as [..., ceil(N / block), D]."""
    tokens = x.shape[-2]
    sums = pad_to_multiple(x.mT, block).unflatten(-1, (-1, block)).sum(-1).mT
    starts = torch.arange(0, tokens, block, device=x.device)
    return sums / (tokens - starts).clamp_max(block)[:, None]


def per_token(x: torch.Tensor, block: int, tokens: int) -> torch.Tensor:
    """Each row of ``x`` [..., ceil(tokens / block), D] repeated for the tokens of its block."""
    return x.repeat_interleave(block, -2)[..., :tokens, :]


@functools.lru_cache(maxsize=32)
def hadamard(dim: int, device: torch.device) -> torch.Tensor:
    """Orthonormal, symmetric [dim, dim] matrix: Walsh-Hadamard blocks on the diagonal.

    A block's size is the largest power of two that divides dim, so that no padding is needed.
    """
    size = dim & -dim
    block = torch.ones(1, 1, device=device)
    while block.shape[0] < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / size**0.5] * (dim // size))
