"""Inputs that tests of INT8 kernels share."""

import torch


def tensors(b=1, hq=2, hk=1, nq=40, nk=140, d=64, dtype=torch.bfloat16, seed=0):
    """q [b, hq, nq, d], k and v [b, hk, nk, d], token-major in memory as models make them."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(b, n, h, d, generator=generator).to(dtype).transpose(1, 2)
        for h, n in ((hq, nq), (hk, nk), (hk, nk))
    ]


def elsewhere(x: torch.Tensor, start: int) -> torch.Tensor:
    """``x`` with its strides, ``start`` elements behind the start of an allocation."""
    memory = torch.zeros(start + x.numel(), dtype=x.dtype)
    return memory[start:].as_strided(x.shape, x.stride()).copy_(x)
