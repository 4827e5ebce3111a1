"""Loading and launching as far as can be told without a GPU: against a driver that answers."""

import contextlib
import ctypes
import sys
import types
from enum import IntEnum

import cuda.bindings
import pytest
import torch
from sageattention3.kernels.jit import cache, loader
from sageattention3.kernels.jit.build import build
from sageattention3.kernels.jit.errors import JitError


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209


class Driver:
    """Takes every call of the loader, records launches, and answers ``statuses`` to them."""

    CUresult = Status
    CUfunction_attribute = types.SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self):
        self.load_status = Status.CUDA_SUCCESS
        self.statuses: list[Status] = []
        self.launches, self.attributes, self.contexts = [], [], []

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        return Status.CUDA_SUCCESS, f"context {device}"

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.contexts.append(context)
        return (Status.CUDA_SUCCESS,)

    def cuModuleLoadData(self, cubin):  # noqa: N802
        return self.load_status, "module"

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        return Status.CUDA_SUCCESS, name.decode()

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        self.attributes.append((attribute, value))
        return (Status.CUDA_SUCCESS,)

    def cuLaunchKernel(self, function, *arguments):  # noqa: N802
        *shape, stream, pointers, _ = arguments
        block = ctypes.c_void_p.from_address(pointers).value
        self.launches.append((shape, stream, ctypes.string_at(block, 32)))
        return (self.statuses.pop(0) if self.statuses else Status.CUDA_SUCCESS,)


@pytest.fixture
def driver(monkeypatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(cuda.bindings, "driver", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: 77 + device, raising=False
    )
    return fake


def test_launch_passes_shape_stream_and_packed_parameters(saxpy, driver):
    variant = saxpy()
    loader.launch(variant, 0, 5, 1, 2, 3, 0.5)
    ((shape, stream, block),) = driver.launches
    assert shape == [5, 1, 1, 128, 1, 1, 512]
    assert stream == 77
    assert variant.packer.unpack(block) == (1, 2, 3, 0.5)
    assert driver.attributes == [(8, 512)]


def test_kernel_is_loaded_once_per_device(saxpy, driver):
    variant = saxpy()
    for device in (0, 1, 1, 0):
        loader.launch(variant, device, 1, 1, 2, 3, 0.5)
    assert driver.contexts == ["context 0", "context 1"]
    assert [stream for _, stream, _ in driver.launches] == [77, 78, 78, 77]


def test_thread_without_a_context_gets_torchs_and_launches_again(saxpy, driver):
    variant = saxpy()
    loader.prepare([variant], 0)
    driver.contexts.clear()
    driver.statuses = [Status.CUDA_ERROR_INVALID_CONTEXT]
    loader.launch(variant, 0, 1, 1, 2, 3, 0.5)
    assert driver.contexts == ["context 0"]
    assert len(driver.launches) == 2


def test_refused_launch_names_the_kernel_its_size_and_the_drivers_reason(saxpy, driver):
    driver.statuses = [Status.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(
        loader.LaunchError,
        match=r"saxpy<4, false>, 0 blocks of 128 threads.*CUDA_ERROR_INVALID_VALUE",
    ):
        loader.launch(saxpy(), 0, 0, 1, 2, 3, 0.5)


def test_cubin_that_the_driver_refuses_is_reported_with_what_to_do(saxpy, driver):
    driver.load_status = Status.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(loader.LoadError, match=r"NO_BINARY_FOR_GPU.*driver as new as"):
        loader.prepare([saxpy()], 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"params": "QQQ"}, "Params has 32 bytes"), ({"threads": 64}, "__launch_bounds__ says 128")],
)
def test_variant_that_contradicts_its_kernel_is_never_loaded(saxpy, driver, changes, reason):
    with pytest.raises(loader.LoadError, match=reason):
        loader.prepare([saxpy(**changes)], 0)
    assert driver.contexts == []


def test_a_gpu_added_after_installation_gets_its_kernels_at_their_first_use(
    saxpy, driver, monkeypatch
):
    build([(saxpy(), 90)])
    capabilities = {0: (9, 0), 1: (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.get)
    variant = saxpy()
    loader.launch(variant, 0, 1, 1, 2, 3, 0.5)
    assert built_for() == {"sm_90a"}, "nothing was built anew"
    loader.launch(variant, 1, 1, 1, 2, 3, 0.5)
    assert {arch[:6] for arch in built_for()} == {"sm_90a", "sm_120"}


def built_for() -> set[str]:
    return {cache.unseal(path.read_bytes()).record["arch"] for path in cache.entries()}


def test_unsupported_gpu_is_refused_in_words(saxpy, driver, monkeypatch):
    """QA-36."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(JitError, match=r"7\.5 is not supported"):
        loader.prepare([saxpy()], 0)


def test_missing_build_package_is_named_at_the_first_use(saxpy, driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.delitem(sys.modules, "sageattention3.kernels.jit.build")
    with pytest.raises(loader.LoadError, match=r"misses a package.*ninja"):
        loader.prepare([saxpy()], 0)
