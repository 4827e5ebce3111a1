"""``launch`` of kernels/jit/loader.py for tensors in the CPU's memory: NVRTC's PTX, interpreted."""

from dataclasses import replace
from functools import lru_cache

from sageattention3.kernels.jit import compile as jit
from sageattention3.kernels.jit.nvrtc import find_nvrtc
from sageattention3.kernels.jit.variants import Variant

from .machine import Code, Launch, Machine
from .memory import Memory, tensors_of_callers
from .ptx import KernelError, parse

_MOST_WARPS = 128  # that run together; more take longer, but less each
Edit = tuple[str, str, str]


@lru_cache(maxsize=24)  # of some hundred thousand objects each
def _code(variant: Variant, sm: int, edit: Edit | None) -> Code:
    job = jit.describe_job(variant, sm, find_nvrtc())
    sources, (file, text, other) = dict(job.sources), edit or ("", "", "")
    if file in sources:
        if text not in sources[file]:
            raise ValueError(f"{file} no longer holds {text!r}")
        sources[file] = sources[file].replace(text, other)
    elif edit and file != "ptx":
        return _code(variant, sm, None)
    arch = job.arch.replace("sm_", "compute_")  # a virtual one: the compiler stops at PTX
    options = ("--std=c++17", "--generate-line-info")
    job = replace(job, sources=tuple(sources.items()), arch=arch, options=options)
    program, name, _ = jit.run_nvrtc(job)
    ptx = jit.fetch(program, "PTX").decode().strip("\0")
    return Code(parse(ptx.replace(text, other) if file == "ptx" else ptx, name))


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
    tensors = Memory(tensors_of_callers())
    step = max(1, _MOST_WARPS * 32 // launch.threads)
    for first in range(0, launch.blocks, step):
        blocks = range(first, min(first + step, launch.blocks))
        try:
            Machine(code, tensors, launch, blocks).run()
        except KernelError as fault:
            raise KernelError(f"{code.program.name}: {fault}") from fault
