"""What a cubin says about its kernel: registers, stack, shared memory, parameter size, block size.

A cubin is an ELF64 file. NVIDIA documents neither its ``.nv.info`` sections nor their attributes;
the few read here have kept their form since CUDA 11, and the tests compare them with what the
compiler printed.
"""

import struct
from typing import NamedTuple

from .errors import JitError
from .variants import Variant

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")

# Attribute: format byte, kind byte, then 2 bytes that are the value or the size of what follows.
_SIZED = 4
_MAX_THREADS = 0x05
_FRAME_SIZE = 0x11
_PARAM_SIZE = 0x19
_REGISTERS = 0x2F


class CubinError(JitError):
    """These bytes are no cubin, or none that holds the wanted kernel."""


class Resources(NamedTuple):
    """Per-thread and per-block needs of one kernel."""

    registers: int  # per thread
    stack_bytes: int  # per thread
    shared_bytes: int  # static, per block, without what the system reserves
    param_bytes: int
    max_threads: int  # first argument of __launch_bounds__; 0 if there is none


def read_resources(cubin: bytes, function: str) -> Resources:
    """Resources of the kernel with the (mangled) name ``function``."""
    try:
        sections = _sections(cubin)
        if f".text.{function}" not in sections:
            raise CubinError(f"the cubin holds no kernel {function}")
        attributes = _attributes(sections[f".nv.info.{function}"].data(cubin))
        symbol = _symbol_index(cubin, sections, function)
        common = _attributes(sections[".nv.info"].data(cubin))
        return Resources(
            registers=_of_symbol(common, _REGISTERS, symbol),
            stack_bytes=_of_symbol(common, _FRAME_SIZE, symbol),
            shared_bytes=_own_shared(sections, function),
            param_bytes=next((v for kind, v in attributes if kind == _PARAM_SIZE), 0),
            max_threads=next(
                (struct.unpack_from("<I", v)[0] for kind, v in attributes if kind == _MAX_THREADS),
                0,
            ),
        )
    except (struct.error, LookupError, OverflowError, StopIteration, ValueError) as error:
        raise CubinError(f"not a cubin that this build understands: {error!r}") from error


def disagreements(variant: Variant, resources: Resources) -> list[str]:
    """Where the Python and the C++ side of a kernel contradict each other, in words."""
    found = []
    if resources.param_bytes != variant.packer.size:
        found.append(
            f"Params has {resources.param_bytes} bytes in C++, "
            f"{variant.packer.size} by the struct format {variant.params!r}"
        )
    if resources.max_threads != variant.threads:
        found.append(
            f"__launch_bounds__ says {resources.max_threads} threads, the variant {variant.threads}"
        )
    return found


class _Section(NamedTuple):
    offset: int
    size: int

    def data(self, cubin: bytes) -> bytes:
        return cubin[self.offset : self.offset + self.size]


def _sections(cubin: bytes) -> dict[str, _Section]:
    magic, *_, start, _, _, _, _, size, count, names = _HEADER.unpack_from(cubin)
    if not magic.startswith(b"\x7fELF\x02\x01"):
        raise CubinError("not an ELF64 file")
    headers = [_SECTION.unpack_from(cubin, start + i * size) for i in range(count)]
    table = _Section(*headers[names][4:6]).data(cubin)
    return {_string(table, header[0]): _Section(*header[4:6]) for header in headers}


def _own_shared(sections: dict[str, _Section], function: str) -> int:
    section = sections.get(f".nv.shared.{function}")
    if section is None:
        return 0
    # From sm_90 on the first KiB of every block, the system's own, is part of the section.
    return section.size - (1024 if ".nv.shared.reserved.0" in sections else 0)


def _symbol_index(cubin: bytes, sections: dict[str, _Section], function: str) -> int:
    strings = sections[".strtab"].data(cubin)
    symbols = _SYMBOL.iter_unpack(sections[".symtab"].data(cubin))
    return next(i for i, symbol in enumerate(symbols) if _string(strings, symbol[0]) == function)


def _attributes(data: bytes) -> list[tuple[int, int | bytes]]:
    found, at = [], 0
    while at < len(data):
        form, kind, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            found.append((kind, data[at : at + value]))
            at += value
        else:
            found.append((kind, value))
    return found


def _of_symbol(attributes: list[tuple[int, int | bytes]], wanted: int, symbol: int) -> int:
    """Value of an attribute that comes as (symbol index, value)."""
    pairs = (struct.unpack("<II", value) for kind, value in attributes if kind == wanted)
    return next(value for index, value in pairs if index == symbol)


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
