"""Calls of SageBwd's kernels, and what their gradients are held to."""

import torch
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import exact_attention, sagebwd_attention

NAMES = ("out", "dQ", "dK", "dV")


def tensors(hq=2, hk=1, nq=40, nk=70, d=64, dtype=torch.bfloat16, seed=0):
    """q, k, v and dO; K and V have the biased channels of real models."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, d_out = (
        torch.randn(1, n, h, d, generator=generator).transpose(1, 2)
        for h, n in ((hq, nq), (hk, nk), (hk, nk), (hq, nq))
    )
    k[..., :2] += 4
    v[..., -1:] -= 2
    return [x.to(dtype) for x in (q, k, v, d_out)]


def gradients(function, q, k, v, d_out, *, mask=None, causal=False):
    """(out, dQ, dK, dV) of ``function`` for the upstream gradient d_out."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, mask=mask, scale=q.shape[-1] ** -0.5, causal=causal)
    out.backward(d_out.to(out.dtype))
    return out.detach(), *(x.grad for x in leaves)


def check(train, *given, **options):
    """No further from FP64 than the algorithm in plain torch, which has coarser scales."""
    mine = gradients(train, *given, **options)
    plain = gradients(sagebwd_attention, *given, **options)
    right = gradients(exact_attention, *(x.double() for x in given), **options)
    for name, x, y, z in zip(NAMES, mine, plain, right, strict=True):
        error, expected = compare(x, z), compare(y, z)
        assert error.finite, name
        # One key alone has P = 1 and no gradient: what is left there is rounding.
        assert error.rel_l1 <= max(expected.rel_l1, 0.02) or error.rmse < 1e-6, (name, error)
    return mine
