"""What a build made: per kernel its time, resources and instructions, and what is wrong with it."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from . import archs, sass
from .build import Built
from .cubin import Resources, disagreements, read_resources
from .loops import count_hot_loop
from .variants import Variant

# The driver keeps this much of an SM's shared memory for itself, per resident block.
_RESERVED_SHARED = 1024
_REGISTER_UNIT = 256  # registers are handed out to a warp in steps of this many
_WARP = 32


@dataclass(frozen=True)
class Row:
    """One kernel for one target. Bytes unless said otherwise; instruction counts are static."""

    kernel: str
    source: str
    arch: str
    seconds: float  # of NVRTC, when it was built
    registers: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    dynamic_shared: int
    cubin: int
    instructions: dict[str, int]  # by unit; empty without nvdisasm
    opcodes: dict[str, int]
    loop: dict[str, int]  # issued once around the hot loop, by unit; see jit/loops.py
    faults: list[str]

    def as_json(self) -> dict:
        return asdict(self)


def make_report(built: Iterable[Built]) -> list[Row]:
    """One row per kernel and target, in order. nvdisasm takes most of the time, so in threads."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_row, built))


def find_faults(
    variant: Variant, sm: int, resources: Resources, spills: int, log: str
) -> list[str]:
    """What a kernel promises through its variant and does not keep, in words."""
    faults = disagreements(variant, resources)
    # ptxas then waits for each wgmma before it goes on: right, but slow.
    faults += [line.strip() for line in log.splitlines() if "are serialized" in line]
    if spills > variant.spill_bytes:
        faults.append(f"spills {spills} bytes of registers, {variant.spill_bytes} are allowed")
    limits = archs.limits(sm)
    shared = resources.shared_bytes + variant.shared_bytes
    if shared > limits.shared_per_block:
        faults.append(
            f"needs {shared} bytes of shared memory, a block has at most {limits.shared_per_block}"
        )
    if (shared + _RESERVED_SHARED) * variant.min_blocks > limits.shared_per_sm:
        faults.append(f"{variant.min_blocks} blocks do not fit an SM's shared memory")
    per_warp = -(-resources.registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    warps = -(-variant.threads // _WARP)
    if per_warp * warps * variant.min_blocks > limits.registers_per_sm:
        faults.append(f"{variant.min_blocks} blocks do not fit an SM's registers")
    return faults


def _row(built: Built) -> Row:
    cubin, record = built.entry
    resources = read_resources(cubin, record["function"])
    code = sass.disassemble(cubin, record["function"]) if sass.find_nvdisasm() else []
    opcodes, loop = sass.count_opcodes(code), count_hot_loop(code)
    spills = max(record["spill_stores"], record["spill_loads"])
    return Row(
        kernel=built.variant.name,
        source=built.variant.source,
        arch=record["arch"],
        seconds=record["seconds"],
        registers=resources.registers,
        spill_stores=record["spill_stores"],
        spill_loads=record["spill_loads"],
        static_shared=resources.shared_bytes,
        dynamic_shared=built.variant.shared_bytes,
        cubin=len(cubin),
        instructions=sass.sum_by_unit(opcodes) if code else {},
        opcodes=dict(sorted(opcodes.items())),
        loop=sass.sum_by_unit(loop) if code else {},
        faults=find_faults(built.variant, built.sm, resources, spills, record["log"]),
    )
