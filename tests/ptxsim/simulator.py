"""``launch`` of kernels/jit/loader.py for tensors in the CPU's memory: NVRTC's PTX, interpreted."""

from dataclasses import replace
from functools import lru_cache

from cuda.bindings import nvrtc
from sageattention3.kernels.jit import compile as jit
from sageattention3.kernels.jit.nvrtc import find_nvrtc
from sageattention3.kernels.jit.variants import Variant

from .machine import Code, Launch, Machine
from .memory import Tensors
from .ptx import KernelError, parse

_MOST_WARPS = 128  # that run together; more take longer, but less each
Edit = tuple[str, str, str]


def make_ptx(job: jit.Job) -> tuple[str, str]:
    """PTX of ``job`` and its kernel's name."""
    jit._load(job)
    (main, text), *headers = [(name.encode(), text.encode()) for name, text in job.sources]
    program = jit._checked(
        nvrtc.nvrtcCreateProgram(
            text, main, len(headers), [text for _, text in headers], [name for name, _ in headers]
        )
    )
    jit._checked(nvrtc.nvrtcAddNameExpression(program, job.expression.encode()))
    # A virtual architecture: the compiler stops at PTX.
    arch = job.arch.replace("sm_", "compute_")
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--generate-line-info"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status:
        log = jit._fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        raise jit.CompileError(log.decode(errors="replace"))
    name = jit._checked(nvrtc.nvrtcGetLoweredName(program, job.expression.encode())).decode()
    ptx = jit._fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode().strip("\0")
    return ptx, name


@lru_cache(maxsize=24)  # of some hundred thousand objects each
def _code(variant: Variant, sm: int, edit: Edit | None) -> Code:
    job = jit.describe_job(variant, sm, find_nvrtc())
    if edit is None:
        return Code(parse(*make_ptx(job)))
    file, *texts = edit
    if file == "ptx":
        ptx, name = make_ptx(job)
        return Code(parse(ptx.replace(*texts), name))
    sources = dict(job.sources)
    if file not in sources:
        return _code(variant, sm, None)
    if texts[0] not in sources[file]:
        raise ValueError(f"{file} no longer holds {texts[0]!r}")
    sources[file] = sources[file].replace(*texts)
    return Code(parse(*make_ptx(replace(job, sources=tuple(sources.items())))))


class Simulator:
    """Launches variants as a GPU of compute capability ``sm`` would.

    edit: (file, text, other text), a fault to put into the source of kernels that have this file,
    or into their PTX, if it is "ptx".
    """

    def __init__(self, sm: int, *, seed: int = 0, edit: Edit | None = None):
        self.sm, self.seed, self.edit = sm, seed, edit

    def launch(self, variant: Variant, device, blocks: int, *values) -> None:
        parameters = variant.packer.pack(*values)
        launch = Launch(parameters, blocks, variant.threads, variant.shared_bytes, self.seed)
        run(_code(variant, self.sm, self.edit), launch)


def run(code: Code, launch: Launch) -> None:
    """Run a grid, as many blocks at a time as make good use of array operations."""
    tensors = Tensors()
    step = max(1, _MOST_WARPS * 32 // launch.threads)
    for first in range(0, launch.blocks, step):
        blocks = range(first, min(first + step, launch.blocks))
        try:
            Machine(code, tensors, launch, blocks).run()
        except KernelError as fault:
            raise KernelError(f"{code.program.name}: {fault}") from fault
