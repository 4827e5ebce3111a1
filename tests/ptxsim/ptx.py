"""Reads PTX: one kernel's instructions with their operands, registers, shared memory and labels.

Only what NVRTC writes for kernels/cuda is understood; anything else is a KernelError with its line.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


class KernelError(Exception):
    """What a kernel did that PTX does not define, or that the interpreter does not know."""


class Register(NamedTuple):
    index: int
    bytes: int  # 0: a predicate


class Immediate(NamedTuple):
    bits: int  # of an integer its value, of a floating-point number its representation


class Special(NamedTuple):
    name: str  # e.g. %tid.x


class Symbol(NamedTuple):
    name: str  # of a parameter, a shared variable or a label


class Address(NamedTuple):
    base: "Register | Symbol | Immediate"
    offset: int


class Vector(NamedTuple):
    parts: tuple  # in braces; None for "_"


class Pair(NamedTuple):
    first: "Register | None"  # of d|p
    second: "Register | None"


class Negated(NamedTuple):
    register: Register


@dataclass(frozen=True)
class Instruction:
    opcode: str  # with all modifiers
    operands: tuple
    guard: Register | Negated | None
    line: int  # of the PTX text
    source: str  # file:line of the CUDA source
    text: str


@dataclass
class Program:
    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # index of the next instruction
    register_bytes: list[int] = field(default_factory=list)
    symbols: dict[str, int] = field(default_factory=dict)  # addresses in their own space
    static_shared: int = 0


_BLANKS = re.compile(r"(?:\s|//[^\n]*)+")
_TOKEN = re.compile(
    r"""(?P<directive>\.(?:loc|file)\s[^\n]*)
      | (?P<open>\{)
      | (?P<close>\})
      | (?P<label>[\w$]+):(?!:)
      | (?P<statement>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*);""",
    re.VERBOSE,
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_SHARED = re.compile(
    r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+([\w$]+)(?:\[(\d*)\])?;"
)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*[/\\])?([^"]*)"', re.MULTILINE)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_INSTRUCTION = re.compile(r"(?:@(!?)([\w$%]+) )?(\S+)(.*)")


def parse(text: str, entry: str | None = None) -> Program:
    """The kernel named ``entry`` in the PTX ``text``, or its only one."""
    entries = [found for found in _ENTRY.finditer(text) if entry in (None, found[1])]
    if len(entries) != 1:
        raise KernelError(f"{len(entries)} kernels named {entry}, one was wanted")
    program = Program(entries[0][1])
    _place_parameters(program, entries[0][2])
    _place_shared(program, text)
    _Body(program, text).read(entries[0].end())
    return program


def _aligned(address: int, alignment: int) -> int:
    return -(-address // alignment) * alignment


def _place_parameters(program: Program, text: str) -> None:
    end = 0
    for alignment, kind, name, count in _PARAMETER.findall(text):
        size = _SIZES[kind.lstrip("bufs")]
        program.symbols[name] = _aligned(end, int(alignment or size))
        end = program.symbols[name] + size * int(count or 1)


def _place_shared(program: Program, text: str) -> None:
    end, dynamic = 0, []
    for extern, alignment, bits, name, count in _SHARED.findall(text):
        size = int(bits) // 8
        if extern:
            dynamic.append((int(alignment or size), name))
            continue
        program.symbols[name] = _aligned(end, int(alignment or size))
        end = program.symbols[name] + size * int(count or 1)
    for alignment, name in dynamic:
        end = program.symbols[name] = _aligned(end, alignment)
    program.static_shared = end


class _Body:
    """Statements from an entry's opening brace to its closing one."""

    def __init__(self, program: Program, text: str):
        self.program = program
        self.text = text
        self.starts = [0, *(found.end() for found in re.finditer("\n", text))]
        self.files = dict(_FILE.findall(text))
        self.scopes: list[dict[str, Register | Symbol]] = [{}]  # registers, and labels in braces
        self.source = ""
        self.line = 0

    def read(self, position: int) -> None:
        while self.scopes:
            blanks = _BLANKS.match(self.text, position)
            position = blanks.end() if blanks else position
            found = _TOKEN.match(self.text, position)
            self.line = bisect_right(self.starts, position)
            if not found:
                raise KernelError(f"PTX line {self.line} is not understood")
            position = found.end()
            kind, text = found.lastgroup, found[found.lastgroup]
            if kind == "directive":
                self._locate(text)
            elif kind == "open":
                self._enter(position)
            elif kind == "close":
                self.scopes.pop()
            elif kind == "label":
                name = self.scopes[-1].get(text, Symbol(text)).name
                self.program.labels[name] = len(self.program.instructions)
            elif text.startswith("."):
                self._declare(text)
            else:
                self.program.instructions.append(self._instruction(text))

    def _enter(self, position: int) -> None:
        """A scope of inline assembly; its labels may be those of another scope too."""
        inside = self.text[position : self.text.index("}\n", position)]
        names = re.findall(r"([\w$]+):(?!:)", inside)
        self.scopes.append({name: Symbol(f"{name}@{position}") for name in names})

    def _locate(self, directive: str) -> None:
        found = _LOC.match(directive)
        if found:
            self.source = f"{self.files.get(found[1], found[1])}:{found[2]}"

    def _declare(self, statement: str) -> None:
        kind, *rest = statement.split(None, 2)
        if kind in (".pragma", ".shared"):
            return
        if kind != ".reg":
            raise KernelError(f"PTX line {self.line}: unknown declaration {statement}")
        size = 0 if rest[0] == ".pred" else _SIZES[rest[0][2:]]
        for name in rest[1].replace(" ", "").split(","):
            found = re.fullmatch(r"(%?\w+)<(\d+)>", name)
            for one in [f"{found[1]}{i}" for i in range(int(found[2]))] if found else [name]:
                self.scopes[-1][one] = Register(len(self.program.register_bytes), size)
                self.program.register_bytes.append(size)

    def _instruction(self, statement: str) -> Instruction:
        text = " ".join(statement.split())
        sign, guard, opcode, rest = _INSTRUCTION.fullmatch(text).groups()
        if guard:
            guard = self._operand(sign + guard)
        operands = tuple(self._operand(part) for part in _split(rest))
        return Instruction(opcode, operands, guard, self.line, self.source, text)

    def _operand(self, text: str):
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        for pattern, make in _OPERANDS:
            found = pattern.fullmatch(text)
            if found:
                return make(self._operand, *found.groups())
        raise KernelError(f"PTX line {self.line}: operand {text} is not understood")


def _address(operand, base: str, sign: str | None, offset: str | None) -> Address:
    step = int(offset or "0", 0)
    return Address(operand(base), -step if sign == "-" else step)


# What operands look like, and what makes them of the pattern's groups; the first is for parts.
_OPERANDS = [
    (re.compile(pattern), make)
    for pattern, make in (
        ("_", lambda operand: None),
        (r"\{(.*)\}", lambda operand, x: Vector(tuple(map(operand, _split(x))))),
        (r"\[([^+\s]+?)\s*(?:([+-])\s*(-?\w+))?\]", _address),
        (r"(.*\S)\s*\|\s*(.*)", lambda operand, x, y: Pair(operand(x), operand(y))),
        ("!(.*)", lambda operand, x: Negated(operand(x))),
        ("(%.*)", lambda operand, x: Special(x)),
        ("0[fFdD]([0-9a-fA-F]+)", lambda operand, x: Immediate(int(x, 16))),
        (r"(-?(?:0[xX][0-9a-fA-F]+|\d+))U?", lambda operand, x: Immediate(int(x, 0))),
        (r"([\w$]+)", lambda operand, x: Symbol(x)),
    )
]


def _split(text: str) -> list[str]:
    """At commas outside of braces and brackets."""
    return [
        part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text) if part.strip()
    ]
