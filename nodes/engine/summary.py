"""A ledger in words: one sentence first, then a table by group of layers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import wrap

from .ledger import HOST, RUNS_KEPT, Entry, Run

REASONS_SHOWN = 3  # in the sentence; the table has them all
SENTENCE_WIDTH = 92  # about what the report node shows without scrolling
LAYERS_WIDTH = 40  # characters of the table's first column before it wraps
REPEATED = "No sampling with this model since the last report; this is the last one:"


def describe_runs(
    runs: Sequence[Run],
    layer_ids: Sequence[str] = (),
    *,
    repeated: bool = False,
    dropped: int = 0,
) -> str:
    """The report of ``runs``: for each a sentence, the table and the notes.

    layer_ids: every layer that each forward pass should call, to tell which were never called.
    repeated, dropped: see ``ledger.Unreported``.
    """
    if not runs:
        return "No sampling run yet: connect this node's samples to a sampler that uses this model."
    total = dropped + len(runs)
    parts = [REPEATED] if repeated else []
    if dropped:
        first = f"the first {_count(dropped, 'run')}" if dropped > 1 else "the first run"
        parts.append(
            f"Not shown: {first} of {total} since the last report; only {RUNS_KEPT} are kept."
        )
    for number, run in enumerate(runs, start=dropped + 1):
        prefix = f"Run {number} of {total}: " if total > 1 else ""
        lines = [*wrap(prefix + describe_run(run), SENTENCE_WIDTH), _heading(run)]
        lines += _table(run.counts, run.steps)
        if run.compiled:
            lines += ["", "In code compiled by torch.compile (calls are not counted there):"]
            lines += _table(dict.fromkeys(run.compiled, 0), run.steps)
        lines += _remarks(run, layer_ids)
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def describe_run(run: Run) -> str:
    """One sentence that a creator can read without knowing the pack; two of an interrupted run."""
    interruption = run.interruption().capitalize()
    if interruption and not run.forwards:
        return interruption
    return f"{interruption}. {_what_ran(run)}" if interruption else _what_ran(run)


def _what_ran(run: Run) -> str:
    if run.compiled:
        precisions = ", ".join(dict.fromkeys(_place(entry) for entry in run.compiled))
        compiled = (
            f"{_count(run.compiled_forwards, 'forward pass', 'forward passes')} ran code compiled "
            f"by torch.compile, where single calls cannot be counted: {precisions}"
        )
        return f"{_spread(run.counts)}; {compiled}" if run.calls else compiled
    if run.calls:
        return _spread(run.counts)
    if run.replaced_by:
        return (
            "0 attention calls seen: another node replaced the attention override after this "
            f"patch ({run.replaced_by}); put SageAttention3 Patch after that node"
        )
    if run.forwards:
        return (
            "0 attention calls seen: this model uses its own attention, which no patch can reach; "
            "it ran unchanged"
        )
    return "0 attention calls seen: sampling ended before the model ran"


def _place(entry: Entry) -> str:
    return "the host" if entry.backend == HOST else f"{entry.precision} ({entry.backend})"


def _spread(counts: Mapping[Entry, int]) -> str:
    """«1,140 of 1,200 attention calls ran in int8 (reference emulation); 60 stayed ...»"""
    total = sum(counts.values())
    quantised = _sum_by(counts, lambda e: None if e.backend == HOST else _place(e))
    reasons = _sum_by(counts, lambda e: e.reason if e.backend == HOST else None)
    left = sum(reasons.values())
    if not quantised:
        return f"All {_count(total, 'attention call')} stayed with the host{_list(reasons)}"
    if len(quantised) == 1:
        where = f"ran in {next(iter(quantised))}"
    else:
        where = "ran quantised: " + ", ".join(f"{n:,} in {name}" for name, n in quantised.items())
    if not left:
        return f"All {_count(total, 'attention call')} {where}"
    return (
        f"{total - left:,} of {_count(total, 'attention call')} {where}; "
        f"{left:,} stayed with the host{_list(reasons)}"
    )


def _list(reasons: Mapping[str, int]) -> str:
    if len(reasons) == 1:
        return f": {next(iter(reasons))}"
    shown = [f"{calls:,}: {reason}" for reason, calls in list(reasons.items())[:REASONS_SHOWN]]
    rest = list(reasons.values())[REASONS_SHOWN:]
    if rest:
        shown.append(f"{sum(rest):,}: {_count(len(rest), 'other reason')}, see below")
    return f" ({'; '.join(shown)})"


def _sum_by(counts: Mapping[Entry, int], key: Callable[[Entry], str | None]) -> dict[str, int]:
    """Calls by ``key(entry)``, most first; entries whose key is None are left out."""
    sums: dict[str, int] = {}
    for entry, calls in counts.items():
        name = key(entry)
        if name is not None:
            sums[name] = sums.get(name, 0) + calls
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def _heading(run: Run) -> str:
    steps = f", {_count(run.steps, 'step')}" if run.steps else ""
    return f"{run.title}{steps}, {_count(run.forwards, 'forward pass', 'forward passes')}"


def _remarks(run: Run, layer_ids: Sequence[str]) -> list[str]:
    remarks = list(run.notes)
    if run.calls and run.replaced_by:
        remarks.append(f"another node's attention override was on top: {run.replaced_by}")
    seen = set(run.layers())
    missing = [layer for layer in layer_ids if layer not in seen]
    if run.calls and missing:
        remarks.append(
            f"never called: {', '.join(layer_ranges(missing))} (another node may skip these layers "
            "or use its own attention for them)"
        )
    lines = [line for remark in remarks for line in wrap(f"Note: {remark}", SENTENCE_WIDTH)]
    return ["", *lines] if lines else []


def _table(counts: Mapping[Entry, int], steps: int) -> list[str]:
    """Aligned rows, one per group of layers with one outcome, in order of first call.

    A count of 0 stands for calls that nobody could count; ``steps`` of 0 for training.
    """
    groups: dict[tuple, list[tuple[Entry, int]]] = {}
    for entry, calls in counts.items():
        stack, _, suffix = _split_id(entry.layer)
        key = (stack, suffix, entry.precision, entry.backend, entry.reason)
        groups.setdefault(key, []).append((entry, calls))
    if not groups:
        return []
    rows = [("layers", "precision", "backend", "calls", "steps", "reason")]
    for (_, _, precision, backend, reason), members in groups.items():
        layers = ", ".join(layer_ranges(entry.layer for entry, _ in members))
        total = sum(calls for _, calls in members)
        spans = ", ".join(_spans(entry.step + 1 for entry, _ in members)) if steps else "-"
        first, *others = wrap(layers, LAYERS_WIDTH, break_long_words=False)
        rows.append((first, precision, backend, f"{total:,}" if total else "-", spans, reason))
        rows += [(other, "", "", "", "", "") for other in others]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        cells[3] = row[3].rjust(widths[3])
        lines.append("  ".join(cells).rstrip())
    return ["", lines[0], "-" * max(map(len, lines)), *lines[1:]]


def layer_ranges(layer_ids: Iterable[str]) -> list[str]:
    """double.0, double.1, double.2, double.7 -> double.0-2, double.7: a selector reads it back."""
    groups: dict[tuple[str, str], list[int]] = {}
    for layer in layer_ids:
        stack, number, suffix = _split_id(layer)
        numbers = groups.setdefault((stack, suffix), [])
        if number is not None:
            numbers.append(number)
    return [
        ".".join(part for part in (stack, span, suffix) if part)
        for (stack, suffix), numbers in groups.items()
        for span in _spans(numbers) or [""]
    ]


def _spans(numbers: Iterable[int]) -> list[str]:
    """1, 2, 3, 7 -> 1-3, 7"""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]


def _split_id(layer: str) -> tuple[str, int | None, str]:
    """input.4.1.self -> ("input", 4, "1.self")"""
    stack, _, rest = layer.partition(".")
    number, _, suffix = rest.partition(".")
    return (stack, int(number), suffix) if number.isdigit() else (layer, None, "")
