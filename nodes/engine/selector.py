"""Text that names layers: ``double.0-2, single.*, *.cross, first 2, last 3``.

A selector is a comma-separated list; order, repeats, spaces and case mean nothing, and the empty
text names no layer. Semicolons and line ends separate too, and full-width or typographic forms of
the characters below, which keyboards and text programs put in their place, stand for these. Each
part is one of::

    double.3      block 3 of a stack, all its calls      block.5.self    one role of it
    double.0-2    blocks 0 to 2                          double.-1       the last block
    single.*      every block of a stack                 *.cross         one role, everywhere
    input.4.1     UNet: transformer 1 of input block 4   *               every layer
    first 2       the first two blocks as they run       last 3          the last three
    7, -1, 2-4    block numbers, for a model with one stack

The role ``cross`` means every cross-attention, whatever it attends to (image, text, audio).
"""

import re
import unicodedata
from dataclasses import dataclass

from .families import CROSS_ROLES, Block
from .layout import Layout
from .words import shorten

_INDEX = re.compile(r"(?P<any>\*)|(?P<first>-?[0-9]{1,6})(?:-(?P<last>[0-9]{1,6}))?")
_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_EDGE = re.compile(r"(?P<end>first|last)\s+(?P<count>[0-9]{1,6})")
_SEPARATOR = re.compile(r"[,;\n\r]")
# What NFKC leaves as it is: dashes and the minus sign, the ideographic comma and full stop.
_PLAIN = str.maketrans(
    {**dict.fromkeys("\u2010\u2012\u2013\u2014\u2015\u2212", "-"), "\u3001": ",", "\u3002": "."}
)
_MAX_CALLS = 4096  # of a model of unknown length: more is a slip of the finger


class SelectorError(ValueError):
    """The text is malformed or names no layer of the model; the message says which part and why."""


@dataclass(frozen=True, order=True)
class _Edge:
    """``first n`` or ``last n``: blocks of the main stacks in execution order."""

    end: str
    count: int

    def __str__(self) -> str:
        return f"{self.end} {self.count}"

    def resolve(self, layout: Layout) -> set[str]:
        if not layout.known:
            if self.end == "last":
                raise _no_length(self, layout)
            return _calls(self, 0, self.count - 1)
        if self.count > len(layout.blocks):
            raise SelectorError(
                f"`{shorten(self)}`: {layout.family} has only {len(layout.blocks)} blocks"
            )
        chosen = (
            layout.blocks[: self.count] if self.end == "first" else layout.blocks[-self.count :]
        )
        return {layer.id for block in chosen for layer in block.layers}


@dataclass(frozen=True, order=True)
class _Path:
    """A stack (``*``: any; empty: the model's only one), index ranges (None: any), a role."""

    stack: str
    ranges: tuple[tuple[int, int] | None, ...]
    role: str

    def __str__(self) -> str:
        parts = [self.stack] if self.stack else []
        for span in self.ranges:
            if span is None:
                parts.append("*")
            else:
                parts.append(str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}")
        return ".".join([*parts, *([self.role] if self.role else [])])

    def resolve(self, layout: Layout) -> set[str]:
        if not layout.known:
            return self._resolve_calls(layout)
        blocks = self._stack(layout)
        for depth, span in enumerate(self.ranges):
            blocks = self._narrow(blocks, depth, span, layout)
        ids = {layer.id for block in blocks for layer in block.layers if self._has_role(layer.role)}
        if not ids:
            known = ", ".join(dict.fromkeys(role for block in blocks for role in block.roles))
            raise SelectorError(
                f"`{shorten(self)}`: no call with role `{shorten(self.role)}` there, only {known}"
            )
        return ids

    def _stack(self, layout: Layout) -> tuple[Block, ...]:
        if self.stack == "*":
            return layout.all_blocks
        if not self.stack:
            if len(layout.stacks) > 1:
                raise SelectorError(
                    f"`{shorten(self)}` is ambiguous: {layout.family} has several stacks "
                    f"({', '.join(layout.stacks)}); write for instance "
                    f"`{next(iter(layout.stacks))}.{shorten(self)}`"
                )
            return layout.all_blocks
        if self.stack not in layout.stacks:
            raise SelectorError(
                f"`{shorten(self)}`: {layout.family} has no `{shorten(self.stack)}`; it has "
                f"{layout.summary()}"
            )
        return layout.stacks[self.stack]

    def _narrow(
        self, blocks: tuple[Block, ...], depth: int, span: tuple[int, int] | None, layout: Layout
    ) -> tuple[Block, ...]:
        deep = tuple(block for block in blocks if len(block.index) > depth)
        if not deep:
            raise SelectorError(f"`{shorten(self)}` has too many numbers for {layout.summary()}")
        if span is None:
            return deep
        numbers = [block.index[depth] for block in deep]
        low, high = span
        if low < 0:  # from the end, as in Python
            there = sorted(set(numbers))
            low = high = there[low] if -low <= len(there) else -1
        chosen = tuple(block for block in deep if low <= block.index[depth] <= high)
        if not chosen or high > max(numbers):
            raise SelectorError(
                f"`{shorten(self)}` is out of range: the model has {layout.summary()}"
            )
        return chosen

    def _has_role(self, role: str) -> bool:
        return not self.role or role == self.role or (self.role == "cross" and role in CROSS_ROLES)

    def _resolve_calls(self, layout: Layout) -> set[str]:
        if self.stack not in ("", "call") or self.role or len(self.ranges) != 1:
            raise SelectorError(
                f"`{shorten(self)}`: the architecture is {layout.family}, so layers have only "
                "numbers, in the order of the calls: write `call.3`, `call.0-5` or `first 6`"
            )
        span = self.ranges[0]
        if span is None or span[0] < 0:
            raise _no_length(self, layout)
        return _calls(self, *span)


class Selector:
    """A parsed selector. Equal if it names the same parts, in whatever order they were written."""

    def __init__(self, parts: frozenset[_Edge | _Path]):
        self._parts = parts

    def __str__(self) -> str:
        return ", ".join(sorted(map(str, self._parts)))

    def __repr__(self) -> str:
        return f"Selector({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selector) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)

    def resolve(self, layout: Layout) -> frozenset[str]:
        """The ids of the layers it names. Raises SelectorError if a part names none."""
        return frozenset().union(*(part.resolve(layout) for part in self._parts))


def parse_selector(text: str) -> Selector:
    """Parse ``text``. Raises SelectorError naming the part that can't be read."""
    plain = unicodedata.normalize("NFKC", text).translate(_PLAIN).lower()
    parts = (part.strip() for part in _SEPARATOR.split(plain))
    return Selector(frozenset(_parse_part(part) for part in parts if part))


def _parse_part(part: str) -> _Edge | _Path:
    if edge := _EDGE.fullmatch(part):
        if count := int(edge["count"]):
            return _Edge(edge["end"], count)
        raise SelectorError(f"`{shorten(part)}` names no block: count from 1")
    words = [word.strip() for word in part.split(".")]
    stack = words.pop(0) if _NAME.fullmatch(words[0]) or words[0] == "*" else ""
    role = words.pop() if words and _NAME.fullmatch(words[-1]) else ""
    if not words and stack != "*":
        name = shorten(stack)
        if role:
            raise SelectorError(
                f"`{shorten(part)}`: after `{name}.` a number, a range or `*` is expected: write "
                f"for instance `{name}.3`, `{name}.0-2`, `{name}.*` or, for a role, `{name}.*.self`"
            )
        raise SelectorError(
            f"`{name}` is not enough: write `{name}.*` for a whole stack, `*.{name}` for a role, "
            "or `first 2`, `last 3`"
        )
    return _Path(stack, tuple(_parse_span(word, part) for word in words), role)


def _parse_span(word: str, part: str) -> tuple[int, int] | None:
    index = _INDEX.fullmatch(word)
    if not index:
        raise SelectorError(
            f"`{shorten(part)}` is not a layer: write for instance `double.3`, `double.0-2`, "
            "`single.*`, `*.cross`, `first 2` or `last 3`, separated by commas"
        )
    if index["any"]:
        return None
    low = int(index["first"])
    if index["last"] is None:
        return low, low
    high = int(index["last"])
    if not 0 <= low <= high:
        raise SelectorError(
            f"`{shorten(part)}` is not a range: write the smaller number first, from 0 up"
        )
    return low, high


def _calls(part: _Edge | _Path, low: int, high: int) -> set[str]:
    if high >= _MAX_CALLS:
        raise SelectorError(f"`{shorten(part)}`: no model makes that many attention calls")
    return {f"call.{i}" for i in range(low, high + 1)}


def _no_length(part: _Edge | _Path, layout: Layout) -> SelectorError:
    return SelectorError(
        f"`{shorten(part)}`: the architecture is {layout.family}, so the number of its layers is "
        "not known beforehand; count from the start: `call.3`, `call.0-5` or `first 6`"
    )
