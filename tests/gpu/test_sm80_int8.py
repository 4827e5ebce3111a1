"""INT8 attention on mma.sync against FP64: every shape, mask and stride that a model may pass."""

import pytest
import torch
from sageattention3.kernels import attention
from sageattention3.kernels.launch.sm80_int8 import attend
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import exact_attention

from .calls import biased, mask_of_kind, random_mask, tensors

pytestmark = pytest.mark.gpu

BACKEND = "sm80_int8"
# Relative L1 on normal tensors is .012 to .017; twice that is a fault, not noise.
BAR = 0.03


def run(q, k, v, **options):
    return attention(q, k, v, precision="int8", backend=BACKEND, **options)


def check(q, k, v, bar=BAR, **options):
    out, right = run(q, k, v, **options), exact_attention(q, k, v, **options)
    errors = compare(out, right)
    assert errors.finite, errors
    assert errors.rel_l1 < bar, errors
    assert out.dtype == q.dtype
    assert out.transpose(1, 2).is_contiguous()
    return out


# --------------------------------------------------------------------------------- shapes, strides
@pytest.mark.parametrize("d", [8, 40, 64, 72, 80, 96, 100, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_head_dim_in_any_dtype(d, dtype):
    check(*tensors(nq=130, nk=333, d=d, dtype=dtype))


@pytest.mark.parametrize("nq", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("nk", [1, 7, 64, 65, 128, 129, 777])
@pytest.mark.parametrize("d", [64, 128])
def test_any_lengths(nq, nk, d):
    check(*tensors(nq=nq, nk=nk, d=d))


@pytest.mark.parametrize(("hq", "hk"), [(8, 1), (8, 2), (6, 3), (5, 5)])
def test_queries_share_key_heads(hq, hk):
    check(*tensors(b=2, hq=hq, hk=hk, nq=200, nk=300))


# ------------------------------------------------------------------------------------------- masks
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("nk", [333, 336])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 200, "k"),
        (2, 1, 200, "k"),
        (1, 1, 200, "k"),
        (2, 1, 1, "k"),
        (1, 4, 1, "k"),
        (1, 1, 200, 1),
    ],
)
@pytest.mark.parametrize("kind", ["bool", "fp32", "bf16", "fp16"])
def test_masks_of_every_broadcast_form(d, nk, shape, kind):
    q, k, v = tensors(b=2, hq=4, hk=2, nq=200, nk=nk, d=d)
    shape = [nk if size == "k" else size for size in shape]
    check(q, k, v, mask=mask_of_kind(kind, *shape))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(("nq", "nk"), [(512, 512), (300, 700), (700, 300), (1, 40), (129, 129)])
def test_causal(d, nq, nk):
    check(*tensors(nq=nq, nk=nk, d=d), causal=True)


def test_causal_and_masked():
    q, k, v = tensors(b=2, hq=4, hk=2, nq=300, nk=336)
    check(q, k, v, mask=random_mask(2, 1, 300, 336), causal=True)


def test_a_query_that_sees_nothing_gets_zeros():
    q, k, v = tensors(nq=70, nk=200)
    mask = random_mask(1, 1, 70, 200)
    mask[:, :, 3] = False
    mask[:, :, 64:] = False  # whole tiles
    assert (check(q, k, v, mask=mask)[:, :, [3, 64, 69]] == 0).all()
    bias = torch.zeros(1, 1, 70, 200, device="cuda").masked_fill(~mask, -torch.inf)
    assert (check(q, k, v, mask=bias)[:, :, [3, 64, 69]] == 0).all()


# ---------------------------------------------------------------------------------------- numerics
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("name", "bar"),
    [("normal", 0.016), ("keys biased", 0.016), ("queries and keys biased alike", 0.035)],
)
def test_accuracy_at_4096_tokens(name, bar, d):
    q, k, v = tensors(hq=8, nq=4096, d=d, dtype=torch.float32)
    k = k if name == "normal" else biased(k, 1)
    q = biased(q, 1) if "alike" in name else q
    check(q.bfloat16(), k.bfloat16(), v.bfloat16(), bar=bar)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-6, 30.0])
def test_any_scale(scale, dtype):
    check(*tensors(dtype=dtype), scale=scale, bar=0.3 if scale == 30 else BAR)


@pytest.mark.parametrize("d", [64, 128])
def test_lse_is_that_of_the_scores(d):
    q, k, v = tensors(b=2, hq=4, hk=2, nq=200, nk=333, d=d)
    k = biased(k, 1)
    mask = random_mask(2, 1, 200, 333)
    mask[:, :, 9] = False
    _, lse = attend(q, k, v, mask=mask, scale=0.1, causal=False, return_lse=True)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.1
    right = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    assert (lse[:, :, 9] == -torch.inf).all()
    seen = right.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert (lse.double() - right)[seen].abs().max() < 0.2
