"""What every native backend owes its callers, whatever it computes in."""

import threading
from typing import NamedTuple

import pytest
import torch
from sageattention3.kernels import attention, explain, selftest
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import exact_attention

from .calls import random_mask, tensors

pytestmark = pytest.mark.gpu


class Backend(NamedTuple):
    """bar: relative L1. Normal tensors reach .017, .18 and .13; above is a fault, not noise.

    limited: takes neither masks nor FP32, and 128 channels only.
    """

    precision: str
    name: str
    bar: float
    capability: tuple[int, int] | None = None  # the only one that has it
    limited: bool = False

    def __call__(self, q, k, v, **options):
        return attention(q, k, v, precision=self.precision, backend=self.name, **options)

    def check(self, q, k, v, **options):
        errors = compare(self(q, k, v, **options), exact_attention(q, k, v, **options))
        assert errors.finite, errors
        assert errors.rel_l1 < self.bar, errors


BACKENDS = (
    Backend("int8", "sm80_int8", 0.03),
    Backend("int8", "sm90_int8", 0.03, capability=(9, 0), limited=True),
    Backend("fp4", "emulated_fp4", 0.25),
    Backend("int8_fp4", "emulated_int8_fp4", 0.2),
)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def run(request):
    wanted = request.param.capability
    if wanted not in (None, torch.cuda.get_device_capability()):
        pytest.skip(f"needs a GPU of compute capability {wanted}")
    return request.param


def skip_if_limited(run):
    if run.limited:
        pytest.skip("such calls go to another backend")


# --------------------------------------------------------------------------------- shapes, strides
@pytest.mark.parametrize("d", [64, 128, 256])
def test_every_remainder_of_keys_ignores_what_lies_behind_them(run, d):
    """Buffers longer than the call, poisoned: a kernel that reads past the end shows it."""
    if d != 128:
        skip_if_limited(run)
    for nk in range(1, 256):
        q, k, v = tensors(nq=32, nk=320, d=d, seed=nk)
        k[:, :, nk:], v[:, :, nk:] = 1e4, torch.inf
        run.check(q, k[:, :, :nk], v[:, :, :nk])


def test_more_batches_and_heads_than_one_dimension_of_a_grid_holds(run):
    q, k, v = tensors(b=70_001, hq=1, nq=5, nk=9)
    run.check(q, k, v)
    run.check(*(x.transpose(0, 1) for x in (q, k, v)))


def test_any_strides(run):
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


def test_inputs_stay_as_they_are(run):
    given = tensors()
    copies = [x.clone() for x in given]
    run(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))


def test_mixed_dtypes_meet_in_the_widest(run):
    skip_if_limited(run)
    q, k, v = tensors(dtype=torch.float16)
    out = run(q, k.float(), v.bfloat16())
    assert out.dtype == torch.float16
    assert compare(out, exact_attention(q, k, v)).rel_l1 < run.bar


# ------------------------------------------------------------------------------------------- masks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_lowest_finite_bias_hides_but_a_row_of_it_attends_evenly(run, dtype):
    skip_if_limited(run)
    q, k, v = tensors(nq=70, nk=200, dtype=dtype)
    bias = torch.zeros(1, 1, 70, 200, device="cuda", dtype=dtype)
    bias[..., 100:] = torch.finfo(dtype).min
    bias[:, :, 5] = torch.finfo(dtype).min
    out, right = run(q, k, v, mask=bias), exact_attention(q, k, v, mask=bias)
    others = [i for i in range(70) if i != 5]
    assert compare(out[:, :, others], right[:, :, others]).rel_l1 < run.bar
    assert compare(out[:, :, 5], right[:, :, 5]).rel_l1 < run.bar


def test_hidden_keys_cannot_matter(run):
    skip_if_limited(run)
    q, k, v = tensors(nq=100, nk=333)
    mask = random_mask(1, 1, 1, 333)
    expected = run(q, k, v, mask=mask)
    hidden = ~mask[0, 0, 0]
    k[:, :, hidden], v[:, :, hidden] = 3e4, -3e4
    assert torch.equal(run(q, k, v, mask=mask), expected)


# ---------------------------------------------------------------------------------------- numerics
@pytest.mark.parametrize("d", [64, 128])
def test_finite_inputs_give_finite_outputs(run, d):
    if d != 128:
        skip_if_limited(run)
    for dtype, large in ((torch.float16, 6e4), (torch.bfloat16, 1e36), (torch.float32, 1e36)):
        if run.limited and dtype == torch.float32:
            continue
        q, k, v = tensors(d=d, dtype=dtype)
        limit = torch.finfo(dtype).max
        huge = [(x.float() * large).clamp(-limit, limit).to(dtype) for x in (q, k, v)]
        for choice in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 0)):
            out = run(
                *(x if keep else big for keep, x, big in zip(choice, (q, k, v), huge, strict=True))
            )
            assert out.isfinite().all(), (dtype, choice)
            assert out.any(-1).all(), (dtype, choice)  # no row lost its maximum


def test_nan_in_an_input_reaches_the_output(run):
    for index in range(3):
        given = tensors(nq=100)
        given[index][0, 0, 3, 5] = torch.nan
        assert run(*given)[0, 0].isnan().any()


def test_values_of_any_size_keep_their_relative_error(run):
    q, k, v = tensors()
    for size in (1e-30, 1e-3, 1e3, 1e30):
        run.check(q, k, v * size)


# ------------------------------------------------------------------------------- streams and graphs
def test_a_side_stream_gives_the_same_bits(run):
    given = tensors(nq=700)
    expected = run(*given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = run(*given)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_a_graph_replays_the_same_bits_on_new_values(run):
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


def test_torch_compile_makes_one_graph_of_it(run):
    given = tensors(nq=300)
    compiled = torch.compile(lambda q, k, v: run(q, k, v), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*given), run(*given))


def test_threads_do_not_disturb_each_other(run):
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
