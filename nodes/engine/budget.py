"""The fastest choice of precisions that keeps the forecast error within a budget.

Each layer takes one precision for the whole run, and the first and last steps may stay in fp16.
For given steps both the time and the squared forecast are sums over layers, so the choice is a
multiple-choice knapsack, which scipy's mixed-integer solver (HiGHS) settles.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ...kernels import PRECISIONS
from .forecast import contributions
from .profile import Profile, ProfileError

# At each end of sampling, up to this part of the steps and this many may stay in fp16.
_EDGE_SHARE, _MOST_EDGE_STEPS = 0.25, 3
# The search ends once nothing can be faster by more than this part: proving more took most of it.
_GAP = 1e-4
# Attention's time where a kernel was not timed (emulation), as part of the host's: only the order
# matters, that of the paper's speeds.
ASSUMED_TIME = {"fp4": 0.25, "int8_fp4": 0.4, "int8": 0.5, "fp16": 1.0}


@dataclass(frozen=True)
class Choice:
    """What runs in which precision, and what that is expected to do.

    precisions: layer -> precision, of every layer of the profile. first, last: steps at the two
    ends that stay in fp16. error: forecast relative L1 of the final latent. seconds: of all
    attention in the run. fp16_seconds: the same in the host's own. timed: whether every time was
    measured, none assumed.
    """

    precisions: Mapping[str, str]
    first: int
    last: int
    start_percent: float
    end_percent: float
    error: float
    seconds: float
    fp16_seconds: float
    timed: bool

    def layers_in(self, precision: str) -> list[str]:
        return [layer for layer, chosen in self.precisions.items() if chosen == precision]


def choose(
    profile: Profile,
    max_error: float,
    candidates: Collection[str] = tuple(PRECISIONS),
    fp16_layers: Collection[str] = (),
) -> Choice:
    """The fastest choice with a forecast of at most ``max_error``.

    candidates: precisions to choose from, fp16 always among them. fp16_layers: layers that stay in
    fp16 whatever they cost. Raises ProfileError if ``profile`` can't tell.
    """
    table = _Table(profile, candidates, fp16_layers)
    edges = range(min(_MOST_EDGE_STEPS, int(profile.steps * _EDGE_SHARE)) + 1)
    best: Choice | None = None
    # Fewest fp16 steps first: what they promise at best often rules the others out unsolved.
    for first, last in sorted(((a, b) for a in edges for b in edges), key=sum):
        times, errors = table.window(first, last)
        if (
            best is not None
            and times.min(0).sum() + table.edge_seconds(first, last) >= best.seconds
        ):
            continue
        chosen = _fastest(times, errors, max_error)
        answer = table.choice(chosen, first, last)
        if best is None or answer.seconds < best.seconds:
            best = answer
    return best


def keep_worst(profile: Profile, precision: str, count: int) -> Choice:
    """All layers in ``precision`` but the ``count`` that lose most, which stay in fp16.

    No other choice of as many layers has a smaller forecast.
    """
    table = _Table(profile, (precision,), ())
    _, errors = table.window(0, 0)
    row = table.names.index(precision)
    worst = np.argsort(-errors[row], kind="stable")[:count]
    chosen = np.full(len(profile.layers), row)
    chosen[worst] = table.names.index("fp16")
    return table.choice(chosen, 0, 0)


class _Table:
    """Times and contributions of every layer in every precision that it may take."""

    def __init__(
        self, profile: Profile, candidates: Collection[str], fp16_layers: Collection[str]
    ) -> None:
        self.profile = profile
        self.names = [p for p in PRECISIONS if p in (*candidates, "fp16")]
        host = profile.seconds.get("fp16")
        if host is None:
            raise ProfileError("the profile holds no times: calibrate again")
        # A layer that was never timed is as good as free: nothing is gained by quantising it.
        host = np.nan_to_num(host.numpy().astype(float))
        times, errors, self._timed = [], [], []
        for name in self.names:
            known = profile.seconds.get(name)
            known = np.full_like(host, np.nan) if known is None else known.numpy().astype(float)
            self._timed.append(~np.isnan(known))
            times.append(np.where(np.isnan(known), host * ASSUMED_TIME[name], known))
            added = contributions(profile, name)
            if name != "fp16":
                added[[layer in fp16_layers for layer in profile.layers]] = np.inf
            errors.append(added)
        self._times = np.stack(times) * profile.calls.numpy()  # [P, L], of one step
        self._errors = np.stack(errors)  # [P, L, S]

    def window(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """(times, contributions), both [P, L], of all steps but the first and last so many."""
        steps = slice(first, self.profile.steps - last)
        return self._times * (steps.stop - first), self._errors[:, :, steps].sum(2)

    def edge_seconds(self, first: int, last: int) -> float:
        return (first + last) * self._times[self.names.index("fp16")].sum()

    def choice(self, chosen: np.ndarray, first: int, last: int) -> Choice:
        """``chosen`` [L], rows of the table, as an answer."""
        times, errors = self.window(first, last)
        columns = np.arange(len(chosen))
        return Choice(
            precisions={
                layer: self.names[row]
                for layer, row in zip(self.profile.layers, chosen, strict=True)
            },
            first=first,
            last=last,
            **_percents(self.profile, first, last),
            error=math.sqrt(np.square(errors[chosen, columns]).sum()),
            seconds=times[chosen, columns].sum() + self.edge_seconds(first, last),
            fp16_seconds=self.edge_seconds(self.profile.steps, 0),
            timed=bool(np.stack(self._timed)[chosen, columns].all()),
        )


def _percents(profile: Profile, first: int, last: int) -> dict[str, float]:
    """The window in percent / 100; its ends lie halfway between steps, safe from rounding."""
    starts = profile.progress.tolist()
    stop = profile.steps - last
    return {
        "start_percent": (starts[first - 1] + starts[first]) / 2 if first else 0.0,
        "end_percent": (starts[stop - 1] + starts[stop]) / 2 if last else 1.0,
    }


def _fastest(times: np.ndarray, errors: np.ndarray, max_error: float) -> np.ndarray:
    """[L]: for each layer the row of ``times`` and ``errors`` ([P, L]) that it should take.

    The last row is fp16, without error: there is always an answer.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    options = list(_useful(times, errors, max_error))
    rows, layers = np.array(options).T
    one_each = np.zeros((times.shape[1], len(options)))
    one_each[layers, np.arange(len(options))] = 1
    constraints = [LinearConstraint(one_each, 1, 1)]
    if max_error > 0:
        budget = np.square(errors[rows, layers] / max_error)
        constraints.append(LinearConstraint(budget[None], ub=1))
    cost = times[rows, layers]
    solved = milp(
        cost / (cost.max() or 1.0),
        integrality=np.ones(len(options)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": _GAP},
    )
    if solved.x is None:
        raise RuntimeError(f"scipy's solver gave no answer: {solved.message}")
    taken = solved.x > 0.5
    chosen = np.empty(times.shape[1], dtype=int)
    chosen[layers[taken]] = rows[taken]
    return chosen


def _useful(times: np.ndarray, errors: np.ndarray, max_error: float) -> Iterable[tuple[int, int]]:
    """(row, layer) of the options that some best answer may hold.

    Left out are those beyond the budget by themselves and those that another one of the layer
    beats or equals in both time and error.
    """
    for layer in range(times.shape[1]):
        kept: list[int] = []
        order = sorted(
            range(len(times)), key=lambda row: (times[row, layer], errors[row, layer], -row)
        )
        for row in order:
            error = errors[row, layer]
            if error <= max_error and all(error < errors[better, layer] for better in kept):
                kept.append(row)
        yield from ((row, layer) for row in kept)
