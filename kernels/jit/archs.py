"""From a GPU's compute capability to the target that NVRTC compiles for, and that GPU's limits.

A compute capability is written ``sm`` here: major * 10 + minor, so 12.0 is 120. Cubins run on their
own minor version and later ones of the same major; the suffix ``a`` ties them to one minor, ``f``
(NVRTC 12.9 and later) to a family. We need a suffix where a kernel uses wgmma (9.0) or the
block-scaled mma.sync (12.x).
"""

import re
from typing import NamedTuple

from .errors import JitError

Version = tuple[int, int]

OLDEST_NVRTC: Version = (12, 8)
SHIPPED = (80, 86, 89, 90, 120)  # built ahead of time where no GPU says what is needed


class UnsupportedArchError(JitError):
    """This GPU, or this GPU with this NVRTC, cannot be built for; the message says what can."""


class Limits(NamedTuple):
    """What one streaming multiprocessor offers."""

    shared_per_sm: int  # bytes
    shared_per_block: int  # bytes, after opting in to more than 48 KiB

    registers_per_sm: int = 65536


_KIB = 1024
# CUDA C++ Programming Guide, table of technical specifications per compute capability.
_LIMITS = {
    80: Limits(164 * _KIB, 163 * _KIB),
    86: Limits(100 * _KIB, 99 * _KIB),
    87: Limits(164 * _KIB, 163 * _KIB),
    89: Limits(100 * _KIB, 99 * _KIB),
    90: Limits(228 * _KIB, 227 * _KIB),
    100: Limits(228 * _KIB, 227 * _KIB),
    110: Limits(228 * _KIB, 227 * _KIB),
    120: Limits(100 * _KIB, 99 * _KIB),
}


def limits(sm: int) -> Limits:
    return _LIMITS[_known(sm)]


def target(sm: int, nvrtc: Version) -> str:
    """The ``--gpu-architecture`` for compute capability ``sm``, e.g. ``sm_90a``.

    Raises UnsupportedArchError for a GPU that is too old or too new for this NVRTC.
    """
    base = _known(sm)
    if base == 90:
        return "sm_90a"
    if base == 110:
        _need(nvrtc, (13, 0), sm)
        return "sm_110"
    if base != 120:
        return f"sm_{base}"
    if sm > 120:
        _need(nvrtc, (12, 9), sm)
    return "sm_120f" if nvrtc >= (12, 9) else "sm_120a"


def parse(name: str) -> int:
    """Compute capability named by ``sm_90a``, ``sm_120f``, ``90`` or ``9.0``."""
    match = re.fullmatch(r"(?:sm_)?(\d{2,3})[af]?|(\d{1,2})\.(\d)", name.strip())
    if not match:
        raise UnsupportedArchError(f"{name!r} is no GPU architecture; write e.g. sm_89 or 8.9")
    digits, major, minor = match.groups()
    sm = int(digits) if digits else int(major) * 10 + int(minor)
    _known(sm)
    return sm


def is_supported(sm: int) -> bool:
    return any(known // 10 == sm // 10 and known <= sm for known in _LIMITS)


def _known(sm: int) -> int:
    """The newest capability we know of that ``sm`` is binary compatible with."""
    family = [known for known in _LIMITS if known // 10 == sm // 10 and known <= sm]
    if not family:
        raise UnsupportedArchError(
            f"compute capability {sm // 10}.{sm % 10} is not supported; "
            "the kernels need 8.0 to 12.x (RTX 30 series or newer)"
        )
    return max(family)


def _need(nvrtc: Version, oldest: Version, sm: int) -> None:
    if nvrtc < oldest:
        raise UnsupportedArchError(
            f"compute capability {sm // 10}.{sm % 10} needs NVRTC {oldest[0]}.{oldest[1]}, "
            f"found {nvrtc[0]}.{nvrtc[1]}: install a torch built for a newer CUDA"
        )
