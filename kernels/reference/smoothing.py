"""Exact rewritings that leave attention as it is and make its operands easier to quantise.

Softmax ignores a constant added to a row of scores, so K may lose its token mean; rows of P sum to
one, so V may too, if the mean is added back to O; Q may lose a mean per block if that mean's scores
are added back (SageAttention3 paper, section 3.1); and Q K^T is unchanged when a channel of Q is
multiplied by what it is divided by in K, or when one orthonormal matrix rotates both.
"""

import functools

import torch

from .formats import pad_to_multiple

SMALLEST_LARGEST = 1e-35
SMALLEST_SHARE = 1 / 4096  # of a channel's deviation in its head's largest; taken for those below


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
    # Dividing first, as in token_mean.
    shares = pad_to_multiple((x / block).mT, block).unflatten(-1, (-1, block)).sum(-1).mT
    starts = torch.arange(0, tokens, block, device=x.device)
    return shares * (block / (tokens - starts).clamp_max(block))[:, None]


def per_token(x: torch.Tensor, block: int, tokens: int) -> torch.Tensor:
    """Each row of ``x`` [..., ceil(tokens / block), D] repeated for the tokens of its block."""
    return x.repeat_interleave(block, -2)[..., :tokens, :]


def balance_factors(q: torch.Tensor, k: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """What to multiply Q's channels by, and divide K's, so that both deviate alike.

    q [..., Hq, N, D] (FP32), whose heads all read the one head of k [..., 1, Nk, D]. Gives
    [..., 1, 1, D]. live: bool [..., 1, Nk, 1], the keys that count; None: all.

    A channel's deviation is the mean one from its mean over tokens, in Q the largest over heads.
    Not the largest over tokens: one key that outshines all others would decide.
    """
    return balance_of(mean_deviation(q, None), mean_deviation(k, live))


def balance_of(q_deviation: torch.Tensor, k_deviation: torch.Tensor) -> torch.Tensor:
    """The same from deviations [..., Hq, 1, D] and [..., 1, 1, D]."""
    shares = []
    for deviation in (k_deviation, q_deviation.amax(-3, keepdim=True)):
        largest = deviation.amax(-1, keepdim=True).clamp_min(SMALLEST_LARGEST)
        shares.append((deviation / largest).clamp_min(SMALLEST_SHARE))
    k_share, q_share = shares
    return (k_share / q_share).sqrt()


def mean_deviation(x: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """Of each channel of ``x`` [..., N, D] from its mean over tokens: [..., 1, D]."""
    count = x.shape[-2] if live is None else live.sum(-2, keepdim=True).clamp_min(1)
    off = (x - token_mean(x, live)).abs()
    off = off if live is None else off.masked_fill(~live, 0.0)
    return (off / count).sum(-2, keepdim=True)


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
