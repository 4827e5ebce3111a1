"""Loading and launching on a real GPU: streams, graphs, threads, refusals."""

import threading

import pytest
import torch
from sageattention3.kernels.jit import build as build_module
from sageattention3.kernels.jit import loader

pytestmark = pytest.mark.gpu

N = 100_000


def run(variant, x, y, a: float) -> None:
    blocks = -(-x.numel() // variant.threads)
    loader.launch(variant, 0, blocks, x.data_ptr(), y.data_ptr(), x.numel(), a)


def expected(x, y, a: float):
    return y + a * x * torch.exp2(y)


@pytest.fixture
def tensors():
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(N, device="cuda", generator=generator)
    return x, torch.rand(N, device="cuda", generator=generator)


def test_kernel_computes_with_the_parameters_it_was_given(saxpy, tensors):
    x, y = tensors
    want = expected(x, y, 0.5)
    run(saxpy(1), x, y, 0.5)
    torch.testing.assert_close(y, want)


def test_launch_follows_torchs_current_stream(saxpy, tensors):
    x, y = tensors
    variant = saxpy(1)
    loader.prepare([variant], 0)
    late, want = torch.zeros_like(x), expected(x, y, 2.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)  # right only if the kernel waits for this copy
        run(variant, late, y, 2.0)
    torch.cuda.synchronize()
    torch.testing.assert_close(y, want)


def test_graph_replay_is_bit_equal_to_eager(saxpy, tensors):
    x, y = tensors
    variant = saxpy(1)
    loader.prepare([variant], 0)
    eager, replayed = y.clone(), y.clone()
    run(variant, x, eager, 0.25)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(variant, x, replayed, 0.25)
    replayed.copy_(y)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(replayed, eager)


def test_thread_that_never_touched_cuda_can_launch(saxpy, tensors):
    x, y = tensors
    variant = saxpy(1)
    loader.prepare([variant], 0)
    want = expected(x, y, 1.5)
    errors = []

    def work():
        try:
            run(variant, x, y, 1.5)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert errors == []
    torch.testing.assert_close(y, want)


def test_threads_that_launch_at_once_keep_their_parameters_apart(saxpy):
    variant = saxpy(1)
    loader.prepare([variant], 0)
    x = torch.ones(1, device="cuda")
    outputs = torch.zeros(4, 2000, device="cuda")

    def work(row: int):
        for y in outputs[row]:
            run(variant, x, y, float(row + 1))

    threads = [threading.Thread(target=work, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    want = torch.arange(1.0, 5.0, device="cuda")[:, None].expand_as(outputs)
    assert torch.equal(outputs, want)


def test_loaded_kernel_is_launched_without_a_build(saxpy, tensors, monkeypatch):
    x, y = tensors
    variant = saxpy(1)
    loader.prepare([variant], 0)
    monkeypatch.setattr(build_module, "build", None)
    loader.prepare([variant], 0)
    run(variant, x, y, 1.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"params": "QQQ"}, "Params has 32 bytes"), ({"threads": 64}, "__launch_bounds__ says 128")],
)
def test_variant_that_contradicts_its_kernel_is_refused_before_any_launch(saxpy, changes, reason):
    with pytest.raises(loader.LoadError, match=reason):
        loader.prepare([saxpy(1, **changes)], 0)


def test_more_shared_memory_than_a_block_can_have_is_refused(saxpy):
    with pytest.raises(loader.LoadError, match="CUDA_ERROR_INVALID_VALUE"):
        loader.prepare([saxpy(1, shared_bytes=1 << 20)], 0)


def test_refused_launch_names_the_kernel_and_its_size(saxpy, tensors):
    x, y = tensors
    with pytest.raises(loader.LaunchError, match=r"saxpy<1, false>, 0 blocks"):
        loader.launch(saxpy(1), 0, 0, x.data_ptr(), y.data_ptr(), N, 1.0)
