"""Machine instructions of a cubin, counted by the unit that executes them; needs ``nvdisasm``."""

import json
import re
import subprocess
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .errors import JitError

# Opcode families by unit; the first match wins. Address and integer arithmetic is "other".
_UNITS = {
    "tensor": r"[HIQOBD]MMA|[HIQ]GMMA|UTC\w*MMA",
    "mufu": r"MUFU",
    "local": r"LDL|STL",
    "shared": r"LDS|LDSM|STS|STSM|ATOMS",
    "global": r"LDG|LDGSTS|STG|RED|REDG|ATOMG|UBLKCP|UTMA\w+",
    "convert": r"F2FP|F2F|F2I|I2F|I2FP|F2IP|I2IP",
    "float": r"FFMA\d?|FADD\d?|FMUL\d?|FMNMX\d?|FSETP|FSEL|HFMA2|HADD2|HMUL2|HMNMX2|HSETP2",
    "shuffle": r"SHFL",
    "sync": r"BAR|SYNCS|DEPBAR|LDGDEPBAR|WARPSYNC|WARPGROUP|MEMBAR|FENCE",
}
_PATTERNS = {unit: re.compile(rf"(?:{names})(?:\.|$)") for unit, names in _UNITS.items()}


class DisassemblyError(JitError):
    """The cubin could not be disassembled; the message says why."""


class Instruction(NamedTuple):
    """One machine instruction, as nvdisasm writes it."""

    predicate: str  # "@P0", "@!UP1"; empty if it is always executed
    opcode: str  # with its modifiers
    operands: str


@lru_cache(maxsize=1)
def find_nvdisasm() -> str | None:
    """Path of nvdisasm, from the package nvidia-cuda-nvdisasm or a toolkit; None if absent."""
    from cuda.pathfinder import find_nvidia_binary_utility

    return find_nvidia_binary_utility("nvdisasm")


def disassemble(cubin: bytes, function: str) -> list[Instruction]:
    """The code of kernel ``function``. Raises DisassemblyError if nvdisasm is missing or fails."""
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        raise DisassemblyError("nvdisasm is missing: install the package nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory(prefix="sageattention3-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([nvdisasm, "-json", str(path)], capture_output=True)
    if done.returncode:
        raise DisassemblyError(f"nvdisasm: {done.stderr.decode(errors='replace')}")
    _, functions = json.loads(done.stdout)
    for listing in functions:
        if listing["function-name"] == function:
            return [
                Instruction(line.get("predicate", ""), line["opcode"], line.get("operands", ""))
                for line in listing["sass-instructions"]
            ]
    raise DisassemblyError(f"the cubin holds no kernel {function}")


def count_opcodes(code: list[Instruction]) -> Counter[str]:
    """How often each opcode, modifiers included, stands in ``code``, but for NOPs: they pad it."""
    opcodes = Counter(instruction.opcode for instruction in code)
    del opcodes["NOP"]
    return opcodes


def is_tensor(instruction: Instruction) -> bool:
    return _PATTERNS["tensor"].match(instruction.opcode) is not None


def sum_by_unit(opcodes: Counter[str]) -> dict[str, int]:
    """Static instruction counts: ``total``, each unit of an attention kernel, and ``other``."""
    counts = dict.fromkeys(_PATTERNS, 0)
    for opcode, count in opcodes.items():
        unit = next((unit for unit, pattern in _PATTERNS.items() if pattern.match(opcode)), None)
        if unit:
            counts[unit] += count
    total = opcodes.total()
    return {"total": total, **counts, "other": total - sum(counts.values())}
