"""Exact rewritings that leave attention as it is and make its operands easier to quantise.

Softmax ignores a constant added to a row of scores, so K may lose its token mean; rows of P sum to
one, so V may too, if the mean is added back to O; Q may lose a mean per block if that mean's scores
are added back (SageAttention3 paper, section 3.1); and Q K^T is unchanged when a channel of Q is
multiplied by what it is divided by in K, or when one orthonormal matrix rotates both.
"""

import functools

import torch

from .formats import pad_to_multiple

SMALLEST_WIDEST = 1e-35
SMALLEST_WIDTH = 1 / 4096  # of a channel, beside the widest of its head; taken for those below


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


def balance_factors(q: torch.Tensor, k: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """What to multiply Q's channels by, and divide K's, so that they are as wide in both.

    q [..., Hq, N, D] (FP32), whose heads all read the one head of k [..., 1, Nk, D]. Gives
    [..., 1, 1, D]. live: bool [..., 1, Nk, 1], the keys that count; None: all. A channel's width is
    the distance of its largest from its smallest value over tokens, in Q the largest over heads.
    """
    shares = []
    for width in (_width(k, live), _width(q, None).amax(-3, keepdim=True)):
        widest = width.amax(-1, keepdim=True).clamp_min(SMALLEST_WIDEST)
        shares.append((width / widest).clamp_min(SMALLEST_WIDTH))
    k_share, q_share = shares
    return (k_share / q_share).sqrt()


def _width(x: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """Half of it: the whole of finite values may be infinite."""
    if live is None:
        return 0.5 * x.amax(-2, keepdim=True) - 0.5 * x.amin(-2, keepdim=True)
    high = x.masked_fill(~live, -torch.inf).amax(-2, keepdim=True)
    low = x.masked_fill(~live, torch.inf).amin(-2, keepdim=True)
    return (0.5 * high - 0.5 * low).clamp_min(0.0)  # minus infinity where no key counts


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
