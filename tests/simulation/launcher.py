"""Runs kernels' sources on the CPU: compiled by g++ against stand-ins for what only a GPU has.

The sources are those of kernels/cuda but for ptx.cuh and pipeline.cuh, which hold the instructions.
So shapes, addresses, barriers and lanes are the kernel's own; what an instruction does is as these
stand-ins read NVIDIA's documents. Slow: a block of 12 warps takes a tenth of a second per tile.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

from sageattention3.demo.pack import ROOT
from sageattention3.kernels.jit.variants import Variant

HERE = Path(__file__).resolve().parent
SOURCES = ROOT / "kernels" / "cuda"
COMPILER = shutil.which("g++")
_FLAGS = "-std=c++17 -O1 -w -ffp-contract=off -fno-strict-aliasing -shared -fPIC"

_ENTRY = """
static const Params* params;
extern "C" void simulate(const void* given, unsigned blocks, unsigned threads, unsigned shared) {{
  static_assert(sizeof(Params) == {size}, "Params is not what the launcher packs");
  params = static_cast<const Params*>(given);
  run_grid([] {{ {expression}(*params); }}, blocks, threads, shared);
}}
"""


class Simulator:
    """``launch`` of kernels/jit/loader.py for tensors in the CPU's memory.

    replace: (file, text, other text), a fault to put into a source.
    """

    def __init__(self, folder: Path, replace: tuple[str, str, str] | None = None):
        self.folder = folder
        self._libraries: dict[Variant, ctypes.CDLL] = {}
        for path in (*SOURCES.glob("*.cuh"), HERE / "ptx.cuh", HERE / "pipeline.cuh"):
            text = path.read_text("utf-8")
            if replace and path.name == replace[0]:
                assert replace[1] in text, f"{path.name} no longer holds {replace[1]!r}"
                text = text.replace(*replace[1:])
            (folder / path.name).write_text(text, encoding="utf-8")

    def launch(self, variant: Variant, device, blocks: int, *values) -> None:
        if variant not in self._libraries:
            self._libraries[variant] = self._compile(variant)
        packed = ctypes.create_string_buffer(variant.packer.size)
        variant.packer.pack_into(packed, 0, *values)
        self._libraries[variant].simulate(packed, blocks, variant.threads, variant.shared_bytes)

    def _compile(self, variant: Variant) -> ctypes.CDLL:
        source = (SOURCES / variant.source).read_text("utf-8")
        # An array of no size cannot stand for dynamic shared memory in C++.
        source = source.replace(
            "extern __shared__ __align__(128) u8 shared[];",
            "u8* shared = reinterpret_cast<u8*>(shared_memory);",
        )
        entry = _ENTRY.format(size=variant.packer.size, expression=variant.expression)
        text, library = (
            self.folder / f"kernel{len(self._libraries)}.{suffix}" for suffix in ("cpp", "so")
        )
        text.write_text(source + entry, encoding="utf-8")
        command = [COMPILER, *_FLAGS.split(), "-include", HERE / "cuda.h", "-o", library, text]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))
