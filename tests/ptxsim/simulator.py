"""``launch`` of kernels/jit/loader.py for tensors in the CPU's memory: NVRTC's PTX, interpreted."""

from cuda.bindings import nvrtc
from sageattention3.kernels.jit import compile as jit
from sageattention3.kernels.jit.nvrtc import find_nvrtc
from sageattention3.kernels.jit.variants import Variant

from .machine import Code, Machine
from .memory import Tensors
from .ptx import KernelError, parse

_MOST_WARPS = 128  # that run together; more take longer, but less each
_MOST_KERNELS = 16  # kept decoded
Edit = tuple[str, str, str]  # file, text, other text


def make_ptx(variant: Variant, sm: int, edit: Edit | None = None) -> tuple[str, str]:
    """PTX of ``variant`` for compute capability ``sm``, and its kernel's name.

    edit: a fault to put into a source; the file may be "ptx", then it goes into the result.
    """
    job = jit.describe_job(variant, sm, find_nvrtc())
    jit._load(job)
    sources = dict(job.sources)
    if edit and edit[0] in sources:
        sources[edit[0]] = _edited(sources[edit[0]], edit)
    (main, text), *headers = [(name.encode(), text.encode()) for name, text in sources.items()]
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
    return (ptx.replace(*edit[1:]) if edit and edit[0] == "ptx" else ptx), name


def _edited(text: str, edit: Edit) -> str:
    file, old, new = edit
    if old not in text:
        raise ValueError(f"{file} no longer holds {old!r}")
    return text.replace(old, new)


class Simulator:
    """Launches variants as a GPU of compute capability ``sm`` would.

    edit: see ``make_ptx``; it concerns only variants whose sources have that file.
    """

    def __init__(self, sm: int, *, seed: int = 0, edit: Edit | None = None):
        self.sm, self.seed, self.edit = sm, seed, edit
        self._code: dict[Variant, Code] = {}

    def launch(self, variant: Variant, device, blocks: int, *values) -> None:
        code = self._code.pop(variant, None)
        if code is None:
            code = Code(parse(*make_ptx(variant, self.sm, self.edit)))
        self._code[variant] = code  # as the newest
        if len(self._code) > _MOST_KERNELS:
            del self._code[next(iter(self._code))]
        run(
            code,
            variant.packer.pack(*values),
            blocks=blocks,
            threads=variant.threads,
            shared_bytes=variant.shared_bytes,
            seed=self.seed,
        )


def run(
    code: Code,
    parameters: bytes,
    *,
    blocks: int,
    threads: int,
    shared_bytes: int = 0,
    seed: int = 0,
) -> None:
    """Run a grid, as many blocks at a time as make good use of array operations."""
    tensors = Tensors()
    step = max(1, _MOST_WARPS * 32 // threads)
    for first in range(0, blocks, step):
        machine = Machine(
            code,
            tensors,
            parameters,
            grid=blocks,
            first=first,
            blocks=min(step, blocks - first),
            threads=threads,
            shared_bytes=shared_bytes,
            seed=seed,
        )
        try:
            machine.run()
        except KernelError as fault:
            raise KernelError(f"{code.program.name}: {fault}") from fault
