"""The reference backend on an NVIDIA GPU: same algorithms, same answers, current stream."""

import pytest
import torch
from sageattention3.kernels import PRECISIONS, attention, attention_trainable, explain, metrics

pytestmark = pytest.mark.gpu

QUANTISED = [p for p in PRECISIONS if p != "fp16"]


def tensors(dtype=torch.float16, b=2, hq=6, hk=3, nq=300, nk=333, d=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((hq, nq), (hk, nk), (hk, nk))
    return [torch.randn(b, h, n, d, generator=generator).to(dtype) for h, n in shapes]


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_cuda_and_cpu_agree(precision, dtype):
    q, k, v = tensors(dtype)
    mask = torch.rand(2, 1, 300, 333, generator=torch.Generator().manual_seed(1)) < 0.7
    expected = attention(q, k, v, precision=precision, mask=mask)
    q, k, v, mask = q.cuda(), k.cuda(), v.cuda(), mask.cuda()
    out = attention(q, k, v, precision=precision, mask=mask, backend="reference")
    errors = metrics.compare(out.cpu(), expected)
    assert errors.finite
    # Sums in another order move a few values across a rounding boundary of the format.
    assert errors.rel_l1 < {"fp4": 2e-2, "int8_fp4": 2e-2, "int8": 4e-3}[precision]


def test_tf32_does_not_leak_into_the_reference():
    q, k, v = (x.cuda() for x in tensors(torch.float32))
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        exact = attention(q, k, v, precision="int8", backend="reference")
        torch.backends.cuda.matmul.allow_tf32 = True
        assert (
            metrics.compare(attention(q, k, v, precision="int8", backend="reference"), exact).rel_l1
            < 4e-3
        )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_work_is_enqueued_on_the_current_stream():
    q, k, v = (x.cuda() for x in tensors())
    expected = attention(q, k, v, precision="fp4")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attention(q, k, v, precision="fp4")
    stream.synchronize()
    assert torch.equal(out, expected)


def test_gradients_on_cuda_agree_with_those_on_the_cpu():
    grads = {}
    for device in ("cpu", "cuda"):
        q, k, v = (x.to(device).requires_grad_() for x in tensors(torch.bfloat16))
        attention_trainable(q, k, v).square().sum().backward()
        grads[device] = [x.grad.cpu() for x in (q, k, v)]
    for on_cpu, on_gpu in zip(grads["cpu"], grads["cuda"], strict=True):
        assert metrics.compare(on_gpu, on_cpu).cosine > 0.9999


def test_without_emulation_the_reference_is_not_offered_on_a_gpu():
    q, k, v = (x.cuda() for x in tensors())
    decision = explain(q, k, v, precision="fp4", emulation=False)
    assert decision.backend is None or decision.native
