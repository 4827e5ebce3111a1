"""Calls of attention that tests share: their inputs, and what they want of the outputs."""

import torch
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import exact_attention


def token_major(*sizes, b=1, d=64, dtype=torch.float32, seed=0):
    """Random [b, heads, tokens, d] for each (heads, tokens), in memory as models make them."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(b, n, h, d, generator=generator).to(dtype).transpose(1, 2) for h, n in sizes
    ]


def tensors(hq=2, hk=1, nq=40, nk=140, dtype=torch.bfloat16, **options):
    """q [b, hq, nq, d], k and v [b, hk, nk, d]."""
    return token_major((hq, nq), (hk, nk), (hk, nk), dtype=dtype, **options)


def in_any_order(simulator, seeds, run):
    """The tensors that ``run`` gives: the same bits however warps interleave."""
    outputs = []
    for simulator.seed in seeds:
        found = run()
        outputs.append(found if isinstance(found, tuple) else (found,))
    simulator.seed = 0
    for others in outputs[1:]:
        same = all(torch.equal(x, y) for x, y in zip(outputs[0], others, strict=True))
        assert same, "not the same bits in every order of warps"
    return found


def check_near_exact(out, q, k, v, bar, **options):
    errors = compare(out, exact_attention(q, k, v, **options))
    assert errors.finite, errors
    assert errors.rel_l1 < bar, errors


def elsewhere(x: torch.Tensor, start: int) -> torch.Tensor:
    """``x`` with its strides, ``start`` elements behind the start of an allocation."""
    memory = torch.zeros(start + x.numel(), dtype=x.dtype)
    return memory[start:].as_strided(x.shape, x.stride()).copy_(x)
