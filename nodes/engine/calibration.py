"""Watches a sampling at full precision and measures what each layer would lose in each precision.

Three things come out of one run, which stays what it would have been:

- the error of each precision in each attention call, on a few rows of the call's own Q, K and V;
- how far the latent moves for it: the model is asked again, with noise of a known size in the
  attention of one group of layers, and the two answers are compared;
- how long the host's attention and native kernels take.

What was never measured goes first, and all of it keeps within an allowance of time.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...kernels import attention, explain
from ...kernels.metrics import Errors
from .allowance import Allowance, clock
from .call import AttentionCall, Refusal
from .families import LayerCall
from .measure import Predictors, blur, errors_of, predictors_of, take_sample
from .schedule import percent_of, position

BLUR = 0.1  # relative L1 of the noise: well above the rounding of 16-bit models, still small
SHARE_OF_REPEATS = 0.3  # of the allowance, for measuring again what was measured before

Group = tuple[str, str]  # stack and role of layers: those of a group weigh alike in the result
UNET = ("input", "middle", "output")  # halves of one stack, each too small to be probed by itself


class Cell(NamedTuple):
    """One layer at one step."""

    layer: str
    step: int


def _lists() -> defaultdict:
    return defaultdict(list)


@dataclass
class Record:
    """What a run has shown so far; an interrupt loses nothing of it.

    errors: precision -> cell -> one entry per measured call. moved: (group, step) -> mean absolute
    change of the denoised latent per relative L1 of one layer's error. seconds: precision -> layer
    -> fastest call. refusals: layers that can't be measured, and why. sigmas: the run's schedule.
    progress: each step's start on the host's schedule, in percent / 100. size: mean absolute value
    of the last denoised latent.
    """

    errors: dict[str, dict[Cell, list[Errors]]] = field(default_factory=lambda: defaultdict(_lists))
    predictors: dict[Cell, list[Predictors]] = field(default_factory=_lists)
    moved: dict[tuple[Group, int], list[float]] = field(default_factory=_lists)
    seconds: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    groups: dict[str, Group] = field(default_factory=dict)  # in order of the first call
    refusals: dict[str, str] = field(default_factory=dict)
    sigmas: list[float] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    steps_done: int = 0
    size: float = math.nan


class Calibration:
    """Fills a :class:`Record` while the host samples.

    precisions: the candidates. emulation: whether those without a native kernel here count.
    """

    def __init__(
        self, precisions: tuple[str, ...], *, emulation: bool, allowance: Allowance | None = None
    ) -> None:
        self.record = Record()
        self._precisions = precisions
        self._emulation = emulation
        self._allowance = allowance or Allowance()
        self._step = 0
        self._measured: dict[tuple[str, str], int] = defaultdict(int)  # (layer, precision) -> calls
        self._costs: dict[str, float] = {}  # precision -> seconds of its last measurement
        self._blurred: Group | None = None  # the group that is under noise
        self._blurred_layers: set[str] = set()

    # --- once per evaluation of the model, guidance included -------------------------------------

    def evaluate(
        self,
        predict: Callable[[], torch.Tensor],
        sigma: float,
        options: dict,
        model_sampling: Any,
    ) -> torch.Tensor:
        """``predict()``, the denoised latent at ``sigma``; asked again under noise.

        options: the transformer_options. model_sampling: the host's noise schedule of the model.
        """
        record = self.record
        if not record.sigmas:
            record.sigmas = options["sample_sigmas"].tolist()
            record.progress = [percent_of(model_sampling, s) for s in record.sigmas[:-1]]
        self._step, _ = position(sigma, options)
        before = self._allowance.plain
        with self._allowance.plain_work():
            denoised = predict()
            record.size = denoised.float().abs().mean().item()
        usual = self._allowance.plain - before
        record.steps_done = self._step + 1
        if record.groups and self._allowance.affords(usual):
            with self._allowance.extra_work():
                self._probe(predict, denoised, self._next_group())
        return denoised

    def _next_group(self) -> Group:
        """The group with the fewest probes."""
        probes = dict.fromkeys(self.record.groups.values(), 0)
        for (group, _), moved in self.record.moved.items():
            probes[group] += len(moved)
        return min(probes, key=probes.get)

    def _probe(
        self, predict: Callable[[], torch.Tensor], denoised: torch.Tensor, group: Group
    ) -> None:
        self._blurred, self._blurred_layers = group, set()
        try:
            again = predict()
        finally:
            self._blurred = None
        moved = (again - denoised).float().abs().mean().item()
        # Noise of different layers is independent: it adds up in squares.
        layers = max(1, len(self._blurred_layers))
        self.record.moved[group, self._step].append(moved / (BLUR * math.sqrt(layers)))

    # --- once per attention call -----------------------------------------------------------------

    def attend(
        self, call: AttentionCall | Refusal, layer: LayerCall, host: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """``host()``, the host's attention, measured; with noise if it is this layer's turn."""
        group = self.record.groups.setdefault(layer.id, _group_of(layer))
        if self._blurred is not None:
            if group != self._blurred:
                return host()
            self._blurred_layers.add(layer.id)
            return blur(host(), BLUR, layer.id)
        if isinstance(call, Refusal):
            self.record.refusals[layer.id] = call.reason
            return host()
        due = [precision for precision in self._precisions if self._is_due(layer.id, precision)]
        if not due:
            return host()
        begin = clock(call.q.device)
        out = host()
        self._note_seconds("fp16", layer.id, clock(call.q.device) - begin)
        for precision in due:
            self._measure(call, out, layer.id, precision)
        return out

    def _is_due(self, layer: str, precision: str) -> bool:
        """Fewest measurements first, as far as the allowance goes."""
        measured, cost = self._measured[layer, precision], self._costs.get(precision, 0.0)
        if not measured:
            return self._allowance.affords(cost)
        others = (
            self._measured[other, precision]
            for other in self.record.groups
            if other not in self.record.refusals
        )
        return measured <= min(others) and self._allowance.affords(cost, SHARE_OF_REPEATS)

    def _measure(self, call: AttentionCall, out: torch.Tensor, layer: str, precision: str) -> None:
        # Outside of the time that is counted: the first call of a kind builds and proves a kernel.
        decision = explain(
            call.q,
            call.k,
            call.v,
            precision=precision,
            mask=call.mask,
            emulation=self._emulation,
        )
        if decision.backend is None:
            self.record.refusals[layer] = decision.reason
            return
        cell, device = Cell(layer, self._step), call.q.device
        with self._allowance.extra_work():
            begin = clock(device)
            sample = take_sample(call, out)
            if precision == self._precisions[0]:
                self.record.predictors[cell].append(predictors_of(sample))
            errors = errors_of(sample, precision, decision.backend)
            self.record.errors[precision][cell].append(errors)
            self._costs[precision] = clock(device) - begin
            if decision.native and not self._measured[layer, precision]:
                for _ in range(2):  # the first one warms up
                    begin = clock(device)
                    attention(
                        call.q,
                        call.k,
                        call.v,
                        precision=precision,
                        mask=call.mask,
                        scale=call.scale,
                        backend=decision.backend,
                    )
                    self._note_seconds(precision, layer, clock(device) - begin)
        self._measured[layer, precision] += 1

    def _note_seconds(self, precision: str, layer: str, seconds: float) -> None:
        known = self.record.seconds[precision]
        known[layer] = min(seconds, known.get(layer, math.inf))


def _group_of(layer: LayerCall) -> Group:
    stack = layer.id.partition(".")[0]
    return "unet" if stack in UNET else stack, layer.role
