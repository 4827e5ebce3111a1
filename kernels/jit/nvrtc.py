"""Finds the NVRTC that CUDA builds of torch bring, with NVIDIA's own search, cuda-pathfinder."""

from functools import lru_cache
from typing import NamedTuple

from .archs import OLDEST_NVRTC, Version
from .errors import JitError

_HOW_TO_GET_ONE = (
    "CUDA builds of torch bring it; without one, install the package nvidia-cuda-nvrtc (CUDA 13) "
    "or nvidia-cuda-nvrtc-cu12"
)


class NvrtcError(JitError):
    """There is no NVRTC to build with; the message says how to get one."""


class Nvrtc(NamedTuple):
    """A loaded NVRTC: its version and the absolute path of its library."""

    version: Version
    library: str


@lru_cache(maxsize=1)
def find_nvrtc() -> Nvrtc:
    """The NVRTC that this process and its compiling children use.

    One that is loaded already (by torch on Windows) wins, then the wheels beside torch, then
    the system's. Raises NvrtcError if there is none, or only one that is too old.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        raise NvrtcError(f"the package cuda-bindings is missing ({error}); install it") from error
    try:
        library = load_nvidia_dynamic_lib("nvrtc").abs_path
        version = _version()
    except Exception as error:  # each release of pathfinder and bindings has its own exceptions
        raise NvrtcError(f"no NVRTC was found: {_HOW_TO_GET_ONE} ({error})") from error
    if version < OLDEST_NVRTC:
        raise NvrtcError(
            f"NVRTC {version[0]}.{version[1]} ({library}) is too old, "
            f"{OLDEST_NVRTC[0]}.{OLDEST_NVRTC[1]} or newer is needed: {_HOW_TO_GET_ONE}"
        )
    return Nvrtc(version, library)


def _version() -> Version:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor
