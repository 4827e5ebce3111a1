"""What ran in which precision, and why not faster: one count per attention call of a sampling run.

The override writes here; the log line, the report and the heat strip read here. Nothing is
sampled or estimated: the counts of a run add up to the calls that the override received. Code made
by torch.compile keeps no counts, so what it did is kept apart.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = "host"
RUNS_KEPT = 32  # a MODEL lives as long as its graph; without a report node nobody collects runs


class Entry(NamedTuple):
    """Calls with equal entries are counted together.

    step: 0-based position in the sampler's schedule. backend: ``HOST`` or a kernel backend's name.
    reason: why this and not less precision, in words; may be empty. fallback: the plan wanted a
    lower precision than the host's, and no backend could serve it.
    """

    step: int
    layer: str
    precision: str
    backend: str
    reason: str = ""
    fallback: bool = False


@dataclass
class Run:
    """One sampling run, from the host's pre-run callback to its clean-up."""

    title: str
    counts: Counter = field(default_factory=Counter)  # Entry -> calls
    compiled: dict[Entry, None] = field(default_factory=dict)  # ordered set; see record_compiled
    forwards: int = 0  # passes through the diffusion model
    compiled_forwards: int = 0  # of them, those in which compiled code made calls
    steps: int = 0  # length of the sampler's schedule; 0 in training
    step: int = 0
    interrupted: bool = False  # by the creator, or by an error
    replaced_by: str = ""  # another node's override that took the place of ours
    notes: dict[str, None] = field(default_factory=dict)  # ordered set of sentences

    @property
    def calls(self) -> int:
        return self.counts.total()

    def layers(self) -> list[str]:
        """Layer ids in the order in which they were first called."""
        return list(dict.fromkeys(entry.layer for entry in (*self.counts, *self.compiled)))

    def cells(self) -> dict[tuple[str, int], Entry]:
        """(layer, step) -> what most of its calls have in common."""
        most: dict[tuple[str, int], Entry] = {}
        for entry in (*self.compiled, *self.counts):
            rival = most.get((entry.layer, entry.step), entry)
            if self.counts[entry] >= self.counts[rival]:
                most[entry.layer, entry.step] = entry
        return most

    def rows(self, repeated: bool = False) -> list[dict]:
        """Every entry and its number of calls, as plain values for other programs.

        Of the whole run, but told in each row: ``interrupted``, and ``repeated``, for a report that
        shows a run again.
        """
        run = {"interrupted": self.interrupted, "repeated": repeated}
        return [{**entry._asdict(), "calls": calls, **run} for entry, calls in self.counts.items()]

    def interruption(self) -> str:
        """Where the run was broken off, in words; empty if it was not."""
        if not self.interrupted:
            return ""
        if not self.forwards:
            return "interrupted before the first step"
        where = f" at step {self.step + 1} of {self.steps}" if self.steps else ""
        return f"interrupted{where}"

    def wanted_but_never_quantised(self) -> bool:
        """True where a creator believes in a patch that did nothing."""
        if self.interrupted and not self.forwards:
            return False
        entries = (*self.counts, *self.compiled)
        nothing_ran = all(entry.backend == HOST for entry in entries)
        return nothing_ran and (not entries or any(entry.fallback for entry in entries))


class Unreported(NamedTuple):
    """What a report has to show. repeated: nothing ran since the last report, so ``runs`` is its
    last one again. dropped: runs since the last report that are no longer kept.
    """

    runs: list[Run]
    repeated: bool = False
    dropped: int = 0


class Ledger:
    """The runs of one patched model, oldest first."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.runs: deque[Run] = deque(maxlen=RUNS_KEPT)
        self._current: Run | None = None
        self._unreported = 0  # runs since the last report, kept or not

    @property
    def current(self) -> Run:
        """The run being written; opened on demand for callers that skip the host's callbacks."""
        if self._current is None:
            self.begin_run()
        return self._current

    def begin_run(self) -> None:
        self._current = Run(self.title)
        self.runs.append(self._current)
        self._unreported += 1

    def end_run(self, interrupted: bool = False) -> Run | None:
        """Close the current run and return it; None if no run was open."""
        run, self._current = self._current, None
        if run is not None:
            run.interrupted = interrupted
        return run

    def begin_forward(self, step: int, steps: int) -> None:
        run = self.current
        run.forwards += 1
        run.step, run.steps = step, max(run.steps, steps)

    def record(self, layer: str, precision: str, backend: str, reason: str, fallback: bool) -> None:
        """Count one call at the current step."""
        run = self.current
        run.counts[Entry(run.step, layer, precision, backend, reason, fallback)] += 1

    def record_compiled(
        self, layer: str, precision: str, backend: str, reason: str, fallback: bool
    ) -> None:
        """Note that compiled code made calls like this at the current step; how many is unknown."""
        run = self.current
        run.compiled[Entry(run.step, layer, precision, backend, reason, fallback)] = None

    def take_unreported(self) -> Unreported:
        """Runs since the last report; if there are none, the last run again.

        The second case is a report of samples that no run of this model made: ComfyUI took them
        from its cache, or another model was sampled.
        """
        self._current = None  # calls from now on, even without the host's callbacks, are news
        count, self._unreported = self._unreported, 0
        runs = list(self.runs)
        if not count:
            return Unreported(runs[-1:], repeated=bool(runs))
        return Unreported(runs[-count:], dropped=max(0, count - len(runs)))
