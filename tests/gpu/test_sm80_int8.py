"""INT8 attention on mma.sync against FP64: every shape, mask and stride that a model may pass."""

import threading

import pytest
import torch
from sageattention3.kernels import attention, explain
from sageattention3.kernels.launch.sm80_int8 import attend
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import exact_attention

pytestmark = pytest.mark.gpu

BACKEND = "sm80_int8"
# Relative L1 on normal tensors is .012 to .017; twice that is a fault, not noise.
BAR = 0.03


def tensors(b=1, hq=2, hk=None, nq=256, nk=None, d=128, dtype=torch.bfloat16, seed=0):
    """q [b, hq, nq, d], k and v [b, hk, nk, d], token-major in memory as models make them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hk, nk = hk or hq, nk or nq
    return [
        torch.randn(b, n, h, d, generator=generator, device="cuda").to(dtype).transpose(1, 2)
        for h, n in ((hq, nq), (hk, nk), (hk, nk))
    ]


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


def random_mask(*shape, share=0.6, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(*shape, generator=generator, device="cuda") < share


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


@pytest.mark.parametrize("d", [64, 128, 256])
def test_every_remainder_of_keys_ignores_what_lies_behind_them(d):
    """Buffers longer than the call, poisoned: a kernel that reads past the end shows it."""
    for nk in range(1, 256):
        q, k, v = tensors(nq=32, nk=320, d=d, seed=nk)
        k[:, :, nk:], v[:, :, nk:] = 1e4, torch.inf
        errors = compare(
            run(q, k[:, :, :nk], v[:, :, :nk]), exact_attention(q, k[:, :, :nk], v[:, :, :nk])
        )
        assert errors.finite, nk
        assert errors.rel_l1 < BAR, (nk, errors)


@pytest.mark.parametrize(("hq", "hk"), [(8, 1), (8, 2), (6, 3), (5, 5)])
def test_queries_share_key_heads(hq, hk):
    check(*tensors(b=2, hq=hq, hk=hk, nq=200, nk=300))


def test_more_batches_and_heads_than_one_dimension_of_a_grid_holds():
    q, k, v = tensors(b=70_001, hq=1, nq=5, nk=9, d=64)
    check(q, k, v)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    check(q, k, v)


def test_any_strides():
    q, k, v = tensors(b=2, hq=3, nq=200)
    expected = run(q, k, v)
    packed = torch.stack((q, k, v), 3).contiguous()  # channels of q, k and v side by side
    assert torch.equal(run(*packed.unbind(3)), expected)
    assert torch.equal(run(*(x.contiguous() for x in (q, k, v))), expected)
    odd = [torch.cat((x, x[..., :3]), -1)[..., :128] for x in (q, k, v)]  # rows of 262 bytes
    assert torch.equal(run(*odd), expected)
    channels = [x.mT.contiguous().mT for x in (q, k, v)]
    assert torch.equal(run(*channels), expected)
    one = [x[:1, :1].expand(2, 3, -1, -1) for x in (q, k, v)]
    assert torch.equal(run(*one)[1, 2], expected[0, 0])


def test_inputs_stay_as_they_are():
    given = tensors()
    copies = [x.clone() for x in given]
    run(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))


def test_mixed_dtypes_meet_in_the_widest():
    q, k, v = tensors(dtype=torch.float16)
    out = run(q, k.float(), v.bfloat16())
    assert out.dtype == torch.float16
    assert compare(out, exact_attention(q, k, v)).rel_l1 < BAR


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
    mask = random_mask(*shape)
    if kind != "bool":
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
        bias = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
        mask = bias.masked_fill(~mask, -torch.inf).to(dtype)
    check(q, k, v, mask=mask)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_lowest_finite_bias_hides_but_a_row_of_it_attends_evenly(dtype):
    q, k, v = tensors(nq=70, nk=200, dtype=dtype)
    bias = torch.zeros(1, 1, 70, 200, device="cuda", dtype=dtype)
    bias[..., 100:] = torch.finfo(dtype).min
    bias[:, :, 5] = torch.finfo(dtype).min
    out = run(q, k, v, mask=bias)
    right = exact_attention(q, k, v, mask=bias)
    others = [i for i in range(70) if i != 5]
    assert compare(out[:, :, others], right[:, :, others]).rel_l1 < BAR
    assert compare(out[:, :, 5], right[:, :, 5]).rel_l1 < BAR


def test_hidden_keys_cannot_matter():
    q, k, v = tensors(nq=100, nk=333)
    mask = random_mask(1, 1, 1, 333)
    expected = run(q, k, v, mask=mask)
    hidden = ~mask[0, 0, 0]
    k[:, :, hidden], v[:, :, hidden] = 3e4, -3e4
    assert torch.equal(run(q, k, v, mask=mask), expected)


# ---------------------------------------------------------------------------------------- numerics
def biased(x, seed, low=5.0, high=20.0):
    """``x`` with four channels per head moved by 5 to 20, as of real models' keys."""
    generator = torch.Generator().manual_seed(seed)
    x = x.clone()
    for head in range(x.shape[1]):
        for channel in torch.randperm(x.shape[-1], generator=generator)[:4]:
            size = low + (high - low) * torch.rand((), generator=generator).item()
            x[:, head, :, channel] += size * (
                1 if torch.rand((), generator=generator) > 0.5 else -1
            )
    return x


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
def test_finite_inputs_give_finite_outputs(d):
    for dtype, large in ((torch.float16, 6e4), (torch.bfloat16, 1e37), (torch.float32, 1e37)):
        q, k, v = tensors(d=d, dtype=dtype)
        limit = torch.finfo(dtype).max
        huge = [(x.float() * large).clamp(-limit, limit).to(dtype) for x in (q, k, v)]
        for choice in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 0)):
            out = run(
                *(x if keep else big for keep, x, big in zip(choice, (q, k, v), huge, strict=True))
            )
            assert out.isfinite().all(), (dtype, choice)


def test_nan_in_an_input_reaches_the_output():
    for index in range(3):
        given = tensors(nq=100)
        given[index][0, 0, 3, 5] = torch.nan
        assert run(*given)[0, 0].isnan().any()


def test_values_of_any_size_keep_their_relative_error():
    q, k, v = tensors()
    for size in (1e-30, 1e-3, 1e3, 1e30):
        check(q, k, v * size)


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


# ------------------------------------------------------------------------------- streams and graphs
def test_a_side_stream_gives_the_same_bits():
    given = tensors(nq=700)
    expected = run(*given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = run(*given)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_a_graph_replays_the_same_bits_on_new_values():
    given = tensors(nq=700)
    run(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*given)
    fresh = tensors(nq=700, seed=7)
    for old, new in zip(given, fresh, strict=True):
        old.copy_(new)
    graph.replay()
    assert torch.equal(out, run(*fresh))


def test_a_kernel_that_never_ran_is_not_captured():
    from sageattention3.kernels import selftest

    given = tensors(d=64, dtype=torch.float32)
    saved = dict(selftest._verdicts)
    selftest._verdicts.clear()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            decision = explain(*given, precision="int8", emulation=False)
            given[0].clone()
    finally:
        selftest._verdicts.update(saved)
    assert decision.backend is None
    assert "before a CUDA graph captures it" in decision.reason


def test_torch_compile_makes_one_graph_of_it():
    given = tensors(nq=300)
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*given), run(*given))


def test_threads_do_not_disturb_each_other():
    calls = [tensors(nq=100 + 50 * i, seed=i) for i in range(4)]
    expected = [run(*call) for call in calls]
    wrong = []

    def work(index):
        for _ in range(20):
            if not torch.equal(run(*calls[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
