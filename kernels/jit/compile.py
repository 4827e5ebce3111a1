"""One variant for one target: what NVRTC is given, and the compilation itself.

``describe_job`` runs in the process that wants the kernel; ``compile_job`` runs in a child of it,
because NVRTC is known to crash on some sources and must not take the user's session along.
"""

import ctypes
import hashlib
import json
import re
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from . import archs
from .cache import Entry
from .errors import JitError
from .nvrtc import Nvrtc
from .variants import Variant

CUDA_FOLDER = Path(__file__).resolve().parent.parent / "cuda"

# -v makes ptxas say registers and spills in the log; it changes no code.
OPTIONS = ("--std=c++17", "--ptxas-options=-v")

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(["<])([^">\n]+)[">]', re.MULTILINE)
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class SourceError(JitError):
    """A kernel's source cannot be put together; the message names the file."""


class CompileError(JitError):
    """NVRTC rejected a kernel; the message holds its log."""


@dataclass(frozen=True)
class Job:
    """All that decides what the cubin will be, and where NVRTC is."""

    expression: str  # e.g. "sm80_int8_attention<128, true>"
    arch: str  # e.g. "sm_90a"
    nvrtc: archs.Version
    options: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]  # (file name, text): the .cu file first, then its includes
    library: str = ""  # path of NVRTC; not part of the key

    @cached_property
    def key(self) -> str:
        """Content hash under which the cubin is kept."""
        content = {name: value for name, value in asdict(self).items() if name != "library"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:40]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        fields = json.loads(text)
        fields["nvrtc"] = tuple(fields["nvrtc"])
        fields["options"] = tuple(fields["options"])
        fields["sources"] = tuple((name, source) for name, source in fields["sources"])
        return cls(**fields)


def describe_job(variant: Variant, sm: int, nvrtc: Nvrtc) -> Job:
    """The job that builds ``variant`` for compute capability ``sm`` (major * 10 + minor).

    Raises UnsupportedArchError if this NVRTC cannot, SourceError if a source file is missing.
    """
    return Job(
        expression=variant.expression,
        arch=archs.target(sm, nvrtc.version),
        nvrtc=nvrtc.version,
        options=OPTIONS,
        sources=tuple(_gather(variant.source).items()),
        library=nvrtc.library,
    )


def compile_job(job: Job) -> Entry:
    """Run NVRTC in this process. Raises CompileError with the compiler's log."""
    started = time.perf_counter()
    program, function, log = run_nvrtc(job)
    cubin = fetch(program, "CUBIN")
    # A kernel that calls a function that was not inlined has one line per function.
    spills = [tuple(map(int, found)) for found in _SPILLS.findall(log)]
    record = {
        "function": function,
        "expression": job.expression,
        "arch": job.arch,
        "nvrtc": list(job.nvrtc),
        "seconds": round(time.perf_counter() - started, 3),
        "spill_stores": sum(stores for stores, _ in spills),
        "spill_loads": sum(loads for _, loads in spills),
        "log": log,
    }
    return Entry(cubin, record)


def run_nvrtc(job: Job) -> tuple[object, str, str]:
    """The compiled program, its kernel's name and the log. Raises CompileError."""
    _load(job)
    from cuda.bindings import nvrtc

    _, *version = nvrtc.nvrtcVersion()
    if tuple(version) != job.nvrtc:
        raise CompileError(f"NVRTC changed from {job.nvrtc} to {tuple(version)}; build again")
    (main, text), *headers = [(name.encode(), text.encode()) for name, text in job.sources]
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            text, main, len(headers), [text for _, text in headers], [name for name, _ in headers]
        )
    )
    _checked(nvrtc.nvrtcAddNameExpression(program, job.expression.encode()))
    options = [option.encode() for option in (f"--gpu-architecture={job.arch}", *job.options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = fetch(program, "ProgramLog").decode(errors="replace").strip("\0 \n")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC {job.nvrtc[0]}.{job.nvrtc[1]}: {status.name}\n{log}")
    function = _checked(nvrtc.nvrtcGetLoweredName(program, job.expression.encode()))
    return program, function.decode(), log


def _load(job: Job) -> None:
    """Load the NVRTC that the key was made for; cuda.bindings then uses it."""
    library = Path(job.library)
    major, minor = job.nvrtc
    # NVRTC opens its built-ins by bare name, and 13.0 on Linux has no search path to find them by.
    for name in (
        f"libnvrtc-builtins.so.{major}.{minor}",
        f"nvrtc-builtins64_{major}{minor}.dll",
        library.name,
    ):
        if (library.parent / name).is_file():
            ctypes.CDLL(str(library.parent / name))


def _gather(source: str) -> dict[str, str]:
    """Text of ``source`` and of every file that it includes, directly or not, by file name."""
    texts: dict[str, str] = {}
    waiting = [(source, "kernels/cuda")]
    while waiting:
        name, wanted_by = waiting.pop(0)
        if name in texts:
            continue
        path = CUDA_FOLDER / name
        if not path.is_file():
            raise SourceError(f"{name}, wanted by {wanted_by}, is not in {CUDA_FOLDER}")
        texts[name] = path.read_text(encoding="utf-8")
        for quote, included in _INCLUDE.findall(texts[name]):
            if quote == "<":
                raise SourceError(f"{name} includes <{included}>; kernels use no system headers")
            waiting.append((included, name))
    return texts


def fetch(program, what: str) -> bytes:
    """NVRTC's "CUBIN", "PTX" or "ProgramLog" of ``program``."""
    from cuda.bindings import nvrtc

    buffer = b" " * _checked(getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    _checked(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer


def _checked(answer: tuple):
    """The value of a cuda.bindings call, which answers (status, value)."""
    status, *values = answer
    if status:
        raise CompileError(f"NVRTC: {status.name}")
    return values[0] if values else None
