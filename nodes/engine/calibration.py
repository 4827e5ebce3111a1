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
from typing import Any

import torch

from ...kernels import attention, explain
from .allowance import Allowance, clock
from .call import AttentionCall, Refusal
from .families import LayerCall
from .layers import OTHER
from .measure import blur, errors_of, predictors_of, take_sample
from .record import Cell, Group, Record, group_of
from .schedule import percent_of, position

BLUR = 0.1  # relative L1 of the noise: well above the rounding of 16-bit models, still small
SHARE_OF_REPEATS = 0.3  # of the allowance, for measuring again what was measured before


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
        if layer.id == OTHER:  # several layers under one name have no error in common
            return host()
        record = self.record
        group = record.groups.setdefault(layer.id, group_of(layer))
        if self._blurred is not None:
            if group != self._blurred:
                return host()
            self._blurred_layers.add(layer.id)
            return blur(host(), BLUR, layer.id)
        record.calls[layer.id] += 1
        record.tokens[layer.id] = call.q_len, call.kv_len
        if isinstance(call, Refusal):
            for precision in self._precisions:
                record.refusals[precision][layer.id] = call.reason
            return host()
        if not any(self._is_due(layer.id, precision) for precision in self._precisions):
            return host()
        begin = clock(call.q.device)
        out = host()
        self._note_seconds("fp16", layer.id, clock(call.q.device) - begin)
        self._measure(call, out, Cell(layer.id, self._step))
        return out

    def _is_due(self, layer: str, precision: str) -> bool:
        """Fewest measurements first, as far as the allowance goes."""
        refused = self.record.refusals[precision]
        if layer in refused:
            return False
        measured, cost = self._measured[layer, precision], self._costs.get(precision, 0.0)
        if not measured:
            return self._allowance.affords(cost)
        others = (
            self._measured[other, precision] for other in self.record.groups if other not in refused
        )
        return measured <= min(others) and self._allowance.affords(cost, SHARE_OF_REPEATS)

    def _measure(self, call: AttentionCall, out: torch.Tensor, cell: Cell) -> None:
        """Every precision that is due on one sample of ``call``."""
        sample = None
        for precision in self._precisions:
            if not self._is_due(cell.layer, precision):
                continue
            # Outside of the time that is counted: a first call builds and proves a kernel.
            decision = explain(
                call.q,
                call.k,
                call.v,
                precision=precision,
                mask=call.mask,
                emulation=self._emulation,
            )
            if decision.backend is None:
                self.record.refusals[precision][cell.layer] = decision.reason
                continue
            with self._allowance.extra_work():
                begin = clock(call.q.device)
                if sample is None:
                    sample = take_sample(call, out)
                    self.record.predictors[cell].append(predictors_of(sample))
                errors = errors_of(sample, precision, decision.backend)
                self.record.errors[precision][cell].append(errors)
                self._costs[precision] = clock(call.q.device) - begin
                if decision.native and not self._measured[cell.layer, precision]:
                    self._time(call, precision, decision.backend, cell.layer)
            self._measured[cell.layer, precision] += 1

    def _time(self, call: AttentionCall, precision: str, backend: str, layer: str) -> None:
        for _ in range(2):  # the first one warms up
            begin = clock(call.q.device)
            attention(
                call.q,
                call.k,
                call.v,
                precision=precision,
                mask=call.mask,
                scale=call.scale,
                backend=backend,
            )
            self._note_seconds(precision, layer, clock(call.q.device) - begin)

    def _note_seconds(self, precision: str, layer: str, seconds: float) -> None:
        known = self.record.seconds[precision]
        known[layer] = min(seconds, known.get(layer, math.inf))
