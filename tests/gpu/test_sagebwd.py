"""SageBwd's kernels against FP64: output and gradients of every kind of call that they take."""

import pytest
import torch
from sageattention3.kernels import attention_trainable
from sageattention3.kernels.launch import sm80_sagebwd, sm90_sagebwd
from sageattention3.kernels.reference import exact_attention

from .calls import mask_of_kind, tensors

pytestmark = pytest.mark.gpu

TRAINERS = {"sm80": sm80_sagebwd.train}
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    TRAINERS["sm90"] = sm90_sagebwd.train

# Cosines on normal tensors are .9998 and more.
BAR = 0.999


def gradients(compute, q, k, v, d_out):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = compute(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out.to(out.dtype))


@pytest.fixture(params=TRAINERS)
def train(request):
    return TRAINERS[request.param]


def check(train, q, k, v, mask=None, causal=False):
    scale = q.shape[-1] ** -0.5
    d_out = torch.randn(q.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    d_out = d_out.to(q.dtype)  # exact and tested gradients are of the same dO

    def ours(q, k, v):
        return train(q, k, v, mask=mask, scale=scale, causal=causal)

    def exact(q, k, v):
        return exact_attention(q, k, v, mask=mask, scale=scale, causal=causal)

    found = gradients(ours, q, k, v, d_out)
    right = gradients(exact, q.double(), k.double(), v.double(), d_out)
    for name, mine, other in zip(("O", "dQ", "dK", "dV"), found, right, strict=True):
        cosine = torch.cosine_similarity(mine.double().flatten(), other.flatten().double(), 0)
        assert cosine > BAR, (name, cosine)
        assert mine.dtype == q.dtype
    again = gradients(ours, q, k, v, d_out)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("d", [40, 64, 104, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_any_head_dim_in_either_dtype(train, d, dtype, causal):
    check(train, *tensors(nq=130, nk=333, d=d, dtype=dtype), causal=causal)


def test_sizes_between_64_and_128():
    check(sm80_sagebwd.train, *tensors(nq=130, nk=333, d=96))


@pytest.mark.parametrize(("nq", "nk"), [(16, 31), (129, 129), (333, 200), (2049, 2049)])
def test_any_lengths(train, nq, nk):
    check(train, *tensors(nq=nq, nk=nk))


@pytest.mark.parametrize(("hq", "hk"), [(4, 2), (3, 1)])
def test_queries_share_key_heads(train, hq, hk):
    check(train, *tensors(b=2, hq=hq, hk=hk, nq=200, nk=300))


@pytest.mark.parametrize("kind", ["bool", "fp32", "bf16"])
def test_masks(kind):
    given = tensors(b=2, hq=4, hk=2, nq=200, nk=333)
    check(sm80_sagebwd.train, *given, mask=mask_of_kind(kind, 2, 1, 200, 333))


@pytest.mark.skipif("sm90" not in TRAINERS, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("d", [64, 128])
def test_the_backend_proves_itself_where_it_is_named(d):
    q, k, v = tensors(nq=200, nk=200, d=d)
    out = attention_trainable(q.requires_grad_(), k, v, backend="sm90_sagebwd")
    out.float().sum().backward()
    assert q.grad.isfinite().all()
