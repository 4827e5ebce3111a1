"""Reads PTX: one kernel's instructions with their operands, registers, shared memory and labels.

Of operands, an integer is a constant (of a floating-point number its representation) or the address
of a variable, a string names a label or an unknown register, None stands for "_", and a tuple for
what is in braces or on both sides of "|". Only what NVRTC writes for kernels/cuda is understood;
anything else is a KernelError with its line.
"""

import re
from collections import ChainMap
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

SPECIAL = ("%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x")  # the first registers of every program


class KernelError(Exception):
    """What a kernel did that PTX does not define, or that the interpreter does not know."""


class Register(NamedTuple):
    index: int
    stored: np.dtype  # unsigned, or bool for a predicate
    negated: bool = False


class Address(NamedTuple):
    base: Register | int
    offset: int


class Instruction(NamedTuple):
    opcode: str  # with all modifiers
    operands: tuple
    guard: Register | None
    line: int  # of the PTX text
    source: str  # file:line of the CUDA source
    text: str

    def __str__(self) -> str:
        return f"PTX line {self.line} ({self.source or 'no source'}): {self.text}"


@dataclass
class Program:
    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # index of the next instruction
    registers: list[np.dtype] = field(default_factory=list)
    static_shared: int = 0


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{")
_VARIABLE = r"(\.extern\s+)?\.{}\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+([\w$]+)(?:\[(\d*)\])?"
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*[/\\])?([^"]*)"', re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<blank>(?:\s|//[^\n]*|\.(?:file|pragma|shared)\s[^\n]*)+)
      | \.loc\s+(?P<location>\d+\s+\d+)[^\n]*
      | (?P<open>\{)
      | (?P<close>\})
      | (?P<label>[\w$]+):(?!:)
      | \.reg\s+\.(?P<registers>[^;]*);
      | (?P<instruction>[^.;{}][^;{}]*(?:\{[^{}]*\}[^;{}]*)*);
      | (?P<unknown>[^\n]+)""",
    re.VERBOSE,
)
_INSTRUCTION = re.compile(r"(?:@(!?[\w$%]+) )?(\S+)(.*)")


def parse(text: str, entry: str | None = None) -> Program:
    """The kernel named ``entry`` in the PTX ``text``, or its only one."""
    entries = [found for found in _ENTRY.finditer(text) if entry in (None, found[1])]
    if len(entries) != 1:
        raise KernelError(f"{len(entries)} kernels named {entry}, one was wanted")
    program, variables, files = Program(entries[0][1]), {}, dict(_FILE.findall(text))
    _place_variables("param", entries[0][2], variables)
    program.static_shared = _place_variables("shared", text, variables)
    _declare(program, variables, "b32 " + " ".join(SPECIAL))
    scopes, source, line = ChainMap({}, variables), "", 1 + text.count("\n", 0, entries[0].end())
    for found in _TOKEN.finditer(text, entries[0].end()):
        kind, token = found.lastgroup, " ".join(found[found.lastgroup].split())
        try:
            if kind == "location":
                file, at = token.split()
                source = f"{files.get(file, file)}:{at}"
            elif kind == "open":  # of inline assembly, whose labels may be those of another one too
                inside = text[found.end() : text.index("}\n", found.end())]
                names = re.findall(r"([\w$]+):(?!:)", inside)
                scopes = scopes.new_child({name: f"{name}@{line}" for name in names})
            elif kind == "close":
                scopes = scopes.parents
                if len(scopes.maps) == 1:
                    break
            elif kind == "label":
                program.labels[scopes.get(token, token)] = len(program.instructions)
            elif kind == "registers":
                _declare(program, scopes, token)
            elif kind == "instruction":
                guard, opcode, rest = _INSTRUCTION.fullmatch(token).groups()
                guard = guard and _operand(scopes, guard)
                operands = tuple(_operand(scopes, part) for part in _split(rest))
                what = Instruction(opcode, operands, guard, line, source, token)
                program.instructions.append(what)
            elif kind == "unknown":
                raise KernelError(f"{token} is not understood")
        except (KernelError, AttributeError) as fault:  # the latter of a negated label
            raise KernelError(f"PTX line {line} ({source}): {fault}") from fault
        line += found[0].count("\n")
    return program


def _place_variables(space: str, text: str, variables: dict[str, int]) -> int:
    """Give each its address, one behind the other; answers the end. External ones come last."""
    end = 0
    found = re.findall(_VARIABLE.format(space), text)
    for extern, alignment, bits, name, count in sorted(found, key=lambda one: bool(one[0])):
        size = int(bits) // 8
        alignment = int(alignment or size)
        variables[name] = -(-end // alignment) * alignment
        end = variables[name] + size * int(count or not extern)
    return end


def _declare(program: Program, scopes, text: str) -> None:
    """Registers, e.g. "b32 %r<40>" for forty of them."""
    kind, names = text.split(" ", 1)
    stored = np.dtype(bool if kind == "pred" else f"u{int(kind[1:]) // 8}")
    for name, count in re.findall(r"([%\w.]+)(?:<(\d+)>)?", names):
        for one in [f"{name}{i}" for i in range(int(count))] if count else [name]:
            scopes[one] = Register(len(program.registers), stored)
            program.registers.append(stored)


def _operand(scopes: ChainMap, text: str):
    if text in scopes:
        return scopes[text]
    for pattern, make in _OPERANDS:
        if found := re.fullmatch(pattern, text):
            return make(partial(_operand, scopes), *found.groups())
    raise KernelError(f"operand {text} is not understood")


# What operands look like, and what makes them of the pattern's groups; the first is for parts.
_OPERANDS = [
    ("_", lambda operand: None),
    (r"\{(.*)\}", lambda operand, x: tuple(map(operand, _split(x)))),
    (
        r"\[([^+\s]+?)\s*(?:\+\s*(-?\w+))?\]",
        lambda operand, base, offset: Address(operand(base), int(offset or "0", 0)),
    ),
    (r"(.*\S)\s*\|\s*(.*)", lambda operand, x, y: (operand(x), operand(y))),
    ("!(.*)", lambda operand, x: operand(x)._replace(negated=True)),
    ("0[fFdD]([0-9a-fA-F]+)", lambda operand, x: int(x, 16)),
    (r"(-?(?:0[xX][0-9a-fA-F]+|\d+))U?", lambda operand, x: int(x, 0)),
    (r"(%?[\w$.]+)", lambda operand, x: x),
]


def _split(text: str) -> list[str]:
    """At commas outside of braces and brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text)
    return [part.strip() for part in parts if part.strip()]
