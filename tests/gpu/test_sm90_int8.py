"""INT8 attention on wgmma against FP64: every shape, stride and dtype that it takes."""

import pytest
import torch
from sageattention3.kernels import attention, explain
from sageattention3.kernels.launch.sm90_int8 import attend
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import exact_attention

from .calls import biased, tensors

pytestmark = pytest.mark.gpu

# Relative L1 on normal tensors is .010 to .016; with few keys and small heads more.
BAR = 0.03


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def check(q, k, v, bar=BAR, **options):
    out = attention(q, k, v, precision="int8", backend="sm90_int8", **options)
    errors = compare(out, exact_attention(q, k, v, **options))
    assert errors.finite, errors
    assert errors.rel_l1 < bar, errors
    assert out.dtype == q.dtype
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("d", [8, 33, 40, 64, 72, 96, 97, 104, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_head_dim_in_any_dtype(d, dtype):
    check(*tensors(nq=130, nk=333, d=d, dtype=dtype))


@pytest.mark.parametrize("nq", [1, 15, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000])
@pytest.mark.parametrize("nk", [1, 7, 64, 127, 128, 129, 256, 513, 777, 2049])
@pytest.mark.parametrize("d", [64, 96, 128])
def test_any_lengths(nq, nk, d):
    check(*tensors(nq=nq, nk=nk, d=d))


@pytest.mark.parametrize(
    ("nq", "nk"), [(512, 512), (300, 700), (700, 300), (1, 40), (129, 129), (2049, 2049)]
)
@pytest.mark.parametrize("d", [64, 96, 128])
def test_causal(nq, nk, d):
    check(*tensors(nq=nq, nk=nk, d=d), causal=True)


@pytest.mark.parametrize(("hq", "hk"), [(8, 1), (8, 2), (6, 3), (5, 5)])
def test_queries_share_key_heads(hq, hk):
    check(*tensors(b=2, hq=hq, hk=hk, nq=200, nk=300))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "bar"),
    [("normal", 0.016), ("keys biased", 0.016), ("queries and keys biased alike", 0.035)],
)
def test_accuracy_at_4096_tokens(name, bar, dtype):
    q, k, v = tensors(hq=8, nq=4096, dtype=torch.float32)
    k = k if name == "normal" else biased(k, 1)
    q = biased(q, 1) if "alike" in name else q
    check(q.to(dtype), k.to(dtype), v.to(dtype), bar=bar)


def test_rising_scores_move_the_references():
    """Keys that grow along the sequence: each tile's maximum is far above the one before it."""
    q, k, v = tensors(nq=256, nk=2048)
    check(q, k * torch.linspace(0.1, 8, 2048, device="cuda")[:, None].to(k.dtype), v, bar=0.1)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-6, 30.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_scale(scale, dtype):
    check(*tensors(dtype=dtype), scale=scale, bar=0.3 if scale == 30 else BAR)


def test_lse_is_that_of_the_scores():
    q, k, v = tensors(b=2, hq=4, hk=2, nq=200, nk=333)
    k = biased(k, 1)
    _, lse = attend(q, k, v, scale=0.1, causal=False, return_lse=True)
    right = (q.double() @ k.double().repeat_interleave(2, 1).mT * 0.1).logsumexp(-1)
    assert (lse.double() - right).abs().max() < 0.2


def test_the_same_call_gives_the_same_bits_every_time():
    given = tensors(hq=24, nq=4096)
    expected = attend(*given, scale=0.1, causal=False)
    for _ in range(50):
        assert torch.equal(attend(*given, scale=0.1, causal=False), expected)


def test_it_is_chosen_where_it_fits():
    q, k, v = tensors()
    assert explain(q, k, v, precision="int8").backend == "sm90_int8"
    assert explain(q, k, v, precision="int8", causal=True).backend == "sm90_int8"
    mask = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool, device="cuda")
    assert explain(q, k, v, precision="int8", mask=mask).backend == "sm80_int8"
    assert explain(*tensors(d=64), precision="int8").backend == "sm90_int8"
    assert explain(*tensors(d=192), precision="int8").backend == "sm80_int8"
