"""One patched model at work: what is decided once per run, per forward pass and per call.

A ``Session`` is reached only through closures on the MODEL, so copies of the MODEL share it and
the host's deep copies of the options leave it whole. It holds no tensor and no reference to the
model.
"""

import itertools
import logging
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ...kernels import explain
from .call import AttentionCall, Refusal
from .compiled import CompiledCalls, LayerClasses
from .layers import STATE_KEY, BlockState, LayerCall, LayerTracker
from .layout import Layout
from .ledger import HOST, Ledger
from .plan import Plan
from .schedule import SigmaWindow, position, sigma_window
from .summary import describe_run

log = logging.getLogger("sageattention3")
_numbers = itertools.count()

# Traced calls of a model whose layers all share one decision.
SELF = LayerCall("compiled.self", "self", False)
CROSS = LayerCall("compiled.cross", "cross", False)


class Choice(NamedTuple):
    """How one call is computed. backend: None leaves it to the host.

    fallback: the plan wanted less than fp16 here and no backend could serve it.
    """

    precision: str
    backend: str | None
    label: str  # the backend as reports name it
    reason: str
    fallback: bool
    trainable: bool = False

    @property
    def outcome(self) -> tuple[str, str, str, bool]:
        """As the ledger keeps it: precision, backend, reason, fallback."""
        return self.precision, self.label, self.reason, self.fallback

    @property
    def settled(self) -> bool:
        """Whether calls of the same kind get the same answer for the rest of the run."""
        return self.label == self.backend or (self.backend is None and not self.fallback)

    @classmethod
    def host(cls, reason: str, fallback: bool = True) -> "Choice":
        return cls("fp16", None, HOST, reason, fallback)


class Session:
    """State of one patched model.

    previous: another node's override that was there before and still serves the calls left to the
    host. key: where a forward pass keeps this session's window flag in transformer_options.
    """

    def __init__(self, plan: Plan, layout: Layout, previous: Any = None) -> None:
        self.plan = plan
        self.layout = layout
        self.previous = previous
        self.key = f"sageattention3.{next(_numbers)}"
        self.tracker = LayerTracker(layout)
        self.ledger = Ledger(f"{layout.family}, {plan.title}")
        self.broken: dict[str, str] = {}  # backend -> what it raised, for the rest of the run
        self.compiled = CompiledCalls()
        self._classes = LayerClasses(layout, plan)
        self._choices: dict[tuple, Choice] = {}  # of this run, by kind of call
        self._window: SigmaWindow | None = None
        self._handled: BaseException | None = None

    @property
    def expected_layers(self) -> list[str]:
        """Ids of the layers that every forward pass calls, whatever its inputs."""
        blocks = self.layout.all_blocks
        return [layer.id for block in blocks for layer in block.layers_given(frozenset())]

    # --- once per sampling run -------------------------------------------------------------------

    def begin_run(self) -> None:
        self.broken.clear()
        self._choices.clear()
        self._window = None
        self._handled = sys.exc_info()[1]  # sampling may start within someone's except clause
        self.ledger.begin_run()
        if self.plan.note:
            self.ledger.current.notes[self.plan.note] = None

    def end_run(self) -> None:
        """Close the run with one line in the log.

        The host calls this from a finally clause; an exception on its way there has broken off the
        run. The steps cannot tell: a schedule may end early, and an interrupt come at the last one.
        """
        error = sys.exc_info()[1]
        run = self.ledger.end_run(interrupted=error is not None and error is not self._handled)
        self._handled = None
        if run is None:
            return
        level = logging.WARNING if run.wanted_but_never_quantised() else logging.INFO
        log.log(level, "%s: %s", run.title, describe_run(run))

    # --- once per forward pass -------------------------------------------------------------------

    def begin_forward(
        self, model_sampling: Any, sigma: float, options: dict, conditions: Iterable[str] = ()
    ) -> dict:
        """The transformer_options of this forward pass; ``options`` stay as they are.

        model_sampling: the host's noise schedule of this model. conditions: names of the model
        inputs that are given.
        """
        if self._window is None:
            plan = self.plan
            self._window = sigma_window(model_sampling, plan.start_percent, plan.end_percent)
        self.ledger.begin_forward(*position(sigma, options))
        options = self.tracker.begin_forward(options, conditions, self._classes.of_block)
        options[self.key] = self._window.contains(sigma)
        return options

    def end_forward(self) -> None:
        marks = self.compiled.take()
        if marks:
            self.ledger.current.compiled_forwards += 1
        for layer, *outcome in marks:
            for member in self._classes.members(layer):
                self.ledger.record_compiled(member, *outcome)

    # --- once per attention call -----------------------------------------------------------------

    def identify(self, options: dict, q_len: int, kv_len: int) -> LayerCall:
        """Name the call that came with ``options``; in traced code, only as far as it decides.

        torch.compile guards on what traced code reads: were that the layer's own id, blocks that
        are compiled one by one would each need a graph of their own.
        """
        if torch.compiler.is_compiling():
            state = options[STATE_KEY]
            if isinstance(state, BlockState):
                return state.decision[state.position(q_len, kv_len)]
            if not self.plan.per_layer:
                return SELF if q_len == kv_len else CROSS
        return self.tracker.identify(options, q_len, kv_len)

    def choose(self, call: AttentionCall | Refusal, layer: LayerCall, in_window: bool) -> Choice:
        """Decide how ``call`` is computed, from shapes, flags and the plan; runs nothing."""
        if isinstance(call, Refusal):
            return Choice.host(call.reason)
        kind = _kind_of(call, layer, in_window)
        choice = self._choices.get(kind)
        if choice is None:
            choice = self._decide(call, layer, in_window)
            if kind is not None and choice.settled:
                self._choices[kind] = choice
        return choice

    def _decide(self, call: AttentionCall, layer: LayerCall, in_window: bool) -> Choice:
        trainable = torch.is_grad_enabled() and (
            call.q.requires_grad or call.k.requires_grad or call.v.requires_grad
        )
        if trainable and not layer.stable and self.plan.per_layer:
            # Checkpointing calls again, in another order, and must find the same answer.
            return Choice.host(
                "the plan treats layers differently, and training cannot tell this one for sure"
            )
        wanted = self.plan.wanted(layer, in_window, call.q_len, call.kv_len)
        if wanted.precisions[0] == "fp16":
            return Choice.host(wanted.reason, fallback=False)
        objections = []
        for precision in wanted.precisions:
            decision = explain(
                call.q,
                call.k,
                call.v,
                precision=precision,
                mask=call.mask,
                trainable=trainable,
                emulation=self.plan.emulation,
            )
            if decision.backend in self.broken:
                objections.append(self._failure(decision.backend))
            elif decision.backend is None:
                objections.append(decision.reason)
            else:
                label = decision.backend if decision.native else f"{decision.backend} emulation"
                reason = "; ".join(text for text in (*objections, decision.reason) if text)
                return Choice(precision, decision.backend, label, reason, False, trainable)
        return Choice.host("; ".join(dict.fromkeys(objections)))

    def give_up_on(self, backend: str, error: Exception) -> Choice:
        """Leave ``backend`` out for the rest of this run, with one line in the log."""
        self._choices.clear()
        self.broken[backend] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        log.error(
            "%s failed and is left out for the rest of this run; the host computes instead",
            backend,
            exc_info=error,
        )
        return Choice.host(self._failure(backend))

    def _failure(self, backend: str) -> str:
        return f"{backend} failed: {self.broken[backend]}"


def _kind_of(call: AttentionCall, layer: LayerCall, in_window: bool) -> tuple | None:
    """All that the choice for an everyday call depends on, beside the plan; None for others.

    A model makes calls of a few kinds thousands of times, and with the caches that a model leaves
    cold, to decide anew took a sixth of the time of a call.
    """
    q, k, v, mask, *_ = call
    if mask is not None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not type(q) is type(k) is type(v) is torch.Tensor:
        return None
    return (
        *(layer, in_window, q.shape, k.shape, v.shape),
        *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
    )
