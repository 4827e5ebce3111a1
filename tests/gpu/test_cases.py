"""Cases that need a GPU: long sequences, sums beyond FP16, memory."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sageattention3.kernels import attention
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import exact_attention

pytestmark = pytest.mark.gpu


def tensors(b, h, n, d=128, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(b, n, h, d, generator=generator, device="cuda", dtype=dtype).transpose(1, 2)
        for _ in range(3)
    ]


def run(q, k, v):
    return attention(q, k, v, precision="int8", backend="sm80_int8")


# ---------------------------------------------------------------------- QA-01: sums beyond FP16
@pytest.mark.parametrize("tokens", [4096, 32768])
def test_values_of_one_sign_under_even_attention_do_not_overflow(tokens):
    """QA-01: sums of P V up to 1e6 were kept in FP16, and pictures came out black."""
    q, k, v = tensors(1, 2, tokens, dtype=torch.float16)
    q, v = q * 1e-3, v.abs() * 5 + 36
    out = run(q, k, v)
    errors = compare(out[:, :, :256], exact_attention(q[:, :, :256], k, v))
    assert errors.finite
    assert errors.rel_l1 < 0.01, errors


# ------------------------------------------------------------------------- QA-13: long sequences
def error_at(tokens):
    q, k, v = tensors(1, 2, tokens)
    rows = torch.randint(tokens, (256,), generator=torch.Generator().manual_seed(1)).cuda()
    return compare(run(q, k, v)[:, :, rows], exact_attention(q[:, :, rows], k, v)).rel_l1


def test_the_error_does_not_grow_with_the_number_of_tokens():
    """QA-13: beyond 65,536 tokens pictures turned to noise, without a word."""
    short = error_at(16_384)
    for tokens in (65_537, 118_800, 131_072, 167_000):
        assert error_at(tokens) < 1.5 * short, tokens


def test_offsets_beyond_two_to_the_31():
    """QA-13: 2.5e9 elements in one tensor; 32-bit offsets would read the first heads again."""
    q, k, v = tensors(1, 1, 300)
    expected = run(q, k, v)
    large = torch.empty(1, 300, 70_000, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    large[:, -1] = q[:, 0]
    assert torch.equal(run(large[:, -1:], k, v), expected)
    strided = torch.empty(300, 70_000, 128, dtype=torch.bfloat16, device="cuda")
    strided[:, -1] = k[0, 0]
    assert torch.equal(run(q, strided[:, -1][None, None], v), expected)


# --------------------------------------------------------------------------------- QA-14: memory
def peak_of(work) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = work()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("heads", "tokens"), [(40, 75_600), (24, 16_384)])
def test_peak_memory_is_that_of_sdpa_and_the_quantised_copies(heads, tokens):
    """QA-14: terms of size tokens x tokens / 128 took 6.7 GiB beside an attention of 0.8 GiB."""
    q, k, v = tensors(1, heads, tokens)
    run(*(x[:, :, :256] for x in (q, k, v)))
    plain = peak_of(lambda: F.scaled_dot_product_attention(q, k, v))
    codes = q.numel() + k.numel() + v.numel()
    scales = 4 * heads * tokens * 2
    assert peak_of(lambda: run(q, k, v)) <= plain + codes + scales + (4 << 20)
