"""Loads built kernels into torch's context and enqueues them on torch's current stream."""

import ctypes
import threading
from collections.abc import Iterable

import torch

from .cubin import disagreements, read_resources
from .errors import JitError
from .variants import Variant

_MAX_PARAM_BYTES = 4096


class LoadError(JitError):
    """The driver does not take a kernel, or the kernel is not what its variant says."""


class LaunchError(JitError):
    """The driver refused a launch."""


def launch(variant: Variant, device: int, blocks: int, *values: int | float | bytes) -> None:
    """Enqueue ``variant`` on the current stream of CUDA device ``device``.

    blocks: of threads, in one dimension. values: the members of the kernel's ``Params``, in order;
    tensors as ``data_ptr()``; bytes for members packed beforehand. Returns at once. Builds
    the kernel first if need be; see :func:`prepare`.
    """
    kernel = _kernels.get((variant, device)) or _obtain([variant], device)[0]
    if torch._C._cuda_getDevice() == device:
        kernel.enqueue(blocks, values)
    else:
        with torch.cuda.device(device):
            kernel.enqueue(blocks, values)


def prepare(variants: Iterable[Variant], device: int) -> None:
    """Build (in parallel) and load what is missing of ``variants``, so that launches only launch.

    Needed before a CUDA graph captures a variant for the first time.
    """
    _obtain(list(variants), device)


class _Arguments(threading.local):
    """Where the driver reads the parameter of a launch from; it copies it before it returns."""

    def __init__(self):
        self.block = ctypes.create_string_buffer(_MAX_PARAM_BYTES)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.block))
        self.address = ctypes.addressof(self.pointers)


class _Kernel:
    """A kernel loaded on one device. ``enqueue`` is the hot path: most of it is the driver's."""

    def __init__(self, variant: Variant, device: int, cubin: bytes, function: str):
        # Here, not above: only machines with a driver get this far.
        from cuda.bindings import driver

        wrong = disagreements(variant, read_resources(cubin, function))
        if wrong:
            raise LoadError(f"{variant.name}: {'; '.join(wrong)}")
        self._variant = variant
        self._device = device
        self._driver = driver
        # Kept here, where a launch finds them sooner.
        self._launch = driver.cuLaunchKernel
        self._pack_into = variant.packer.pack_into
        self._threads = variant.threads
        self._shared_bytes = variant.shared_bytes
        with torch.cuda.device(device):
            self._enter_context()
            self._module = self._loaded(driver.cuModuleLoadData(cubin))
            self._function = self._loaded(
                driver.cuModuleGetFunction(self._module, function.encode())
            )
            if variant.shared_bytes:
                attribute = (
                    driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                )
                self._loaded(
                    driver.cuFuncSetAttribute(self._function, attribute, variant.shared_bytes)
                )

    def enqueue(
        self, blocks: int, values: tuple[int | float | bytes, ...], in_context: bool = False
    ) -> None:
        self._pack_into(_arguments.block, 0, *values)
        (status,) = self._launch(
            self._function,
            blocks,
            1,
            1,
            self._threads,
            1,
            1,
            self._shared_bytes,
            # torch.cuda.current_stream() builds an object: 4 us against 0.1 us.
            torch._C._cuda_getCurrentRawStream(self._device),
            _arguments.address,
            0,
        )
        if not status:
            return
        if status == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT and not in_context:
            # A thread that has allocated from torch's cache only has no context yet.
            self._enter_context()
            self.enqueue(blocks, values, in_context=True)
        else:
            raise LaunchError(
                f"{self._variant.name}, {blocks} blocks of {self._threads} threads, "
                f"{self._shared_bytes} bytes of shared memory: {status.name}"
            )

    def _enter_context(self) -> None:
        """Make torch's (the device's primary) context current in this thread."""
        context = self._loaded(self._driver.cuDevicePrimaryCtxRetain(self._device))
        self._loaded(self._driver.cuCtxSetCurrent(context))

    def _loaded(self, answer: tuple):
        status, *values = answer
        if status:
            raise LoadError(
                f"the NVIDIA driver does not take {self._variant.name} ({status.name}); "
                "a driver as new as torch's CUDA is needed"
            )
        return values[0] if values else None


_arguments = _Arguments()
_kernels: dict[tuple[Variant, int], _Kernel] = {}
_loading = threading.Lock()


def _obtain(variants: list[Variant], device: int) -> list[_Kernel]:
    try:
        # Here, not above: the pack must import without the packages that only the build needs.
        from .build import build
    except ImportError as error:
        raise LoadError(f"the kernel build misses a package ({error}): install it") from error

    with _loading:
        missing = [variant for variant in variants if (variant, device) not in _kernels]
        if missing:
            major, minor = torch.cuda.get_device_capability(device)
            for built in build((variant, major * 10 + minor) for variant in missing):
                _kernels[built.variant, device] = _Kernel(
                    built.variant, device, built.entry.cubin, built.entry.record["function"]
                )
    return [_kernels[variant, device] for variant in variants]
