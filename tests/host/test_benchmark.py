"""SageAttention3 Benchmark in the host, without a GPU and with one that is made up."""

import comfy.model_management
import folder_paths
import pytest
import torch
from comfy.model_management import InterruptProcessingException
from sageattention3.kernels import Capability
from sageattention3.nodes import benchmark
from sageattention3.nodes.benchmark import SageAttention3Benchmark

pytestmark = pytest.mark.host


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))


def test_without_a_gpu_the_node_says_so_and_measures_nothing():
    answer = SageAttention3Benchmark().measure("all", 5)
    picture, text = answer["result"]
    assert text.startswith("There is no NVIDIA GPU here")
    assert answer["ui"]["text"] == (text,)
    assert picture.shape[0] == 1


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with native int8, as far as the node sees; attention takes as long as its turn says."""
    device = torch.device("cuda", 0)
    management = comfy.model_management
    monkeypatch.setattr(management, "get_torch_device", lambda: device)
    monkeypatch.setattr(management, "get_torch_device_name", lambda device: "a GPU")
    freed = []
    monkeypatch.setattr(management, "free_memory", lambda size, device: freed.append(size))
    rows = [Capability("int8", "sm80_int8", True, True, "")]
    monkeypatch.setattr(benchmark, "capabilities", lambda device: rows)

    class Timer:
        def __init__(self, device):
            pass

        def __call__(self, call, times):
            call()
            host = call.func is benchmark._host
            return [3.0 if host else 1.5] * times

    def few_tokens(shape, device):
        return [torch.randn(1, 2, 32, 64) for _ in range(3)]

    monkeypatch.setattr(benchmark, "GpuTimer", Timer)
    monkeypatch.setattr(benchmark, "random_qkv", few_tokens)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return rows, freed


def test_the_hosts_attention_and_ours_are_timed_and_judged(gpu):
    _, freed = gpu
    _, text = SageAttention3Benchmark().measure("image models", 1)["result"]
    assert text.startswith("Use preset balanced here: int8")
    assert "SDXL 2.00x, Flux 2.00x" in text
    assert "1.5 (2.00x)" in text
    flux = 24 * 4608 * 128 * 2
    assert freed[1] >= 4 * flux, "room for what the call needs"


def test_a_gpu_without_native_kernels_gets_their_reason(gpu):
    rows, _ = gpu
    rows[:] = [Capability("int8", "sm80_int8", True, False, "needs compute capability 8.0")]
    _, text = SageAttention3Benchmark().measure("Flux", 1)["result"]
    assert text == "Leave SageAttention3 off for speed: needs compute capability 8.0."


def test_cancel_stops_it_between_two_models(gpu):
    comfy.model_management.interrupt_current_processing(True)
    with pytest.raises(InterruptProcessingException):
        SageAttention3Benchmark().measure("all", 1)
