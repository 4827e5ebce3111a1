"""The attention override of a patched MODEL, and how it gets there.

ComfyUI calls ``transformer_options["optimized_attention_override"](func, *args, **kwargs)`` in
place of its own attention ``func``. Ours is a plain closure: the host deep-copies its options, and
a function is the one thing that survives that as itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...kernels import attention, attention_trainable
from .attach import KEY, OPTION, clone_without_ours, forward_wrapper, set_override
from .call import AttentionCall, read_call
from .layout import Layout
from .plan import Plan
from .session import Choice, Session


def install(model: Any, plan: Plan, layout: Layout) -> Any:
    """A clone of ``model`` (ModelPatcher) that computes attention as ``plan`` says.

    A patch of ours that was there is replaced; another node's override is kept and serves the
    calls that are left to the host.
    """
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    model, previous = clone_without_ours(model)
    session = Session(plan, layout, previous=previous)
    set_override(model, make_override(session))
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, _forward_wrapper(session))
    for event, action in (
        (CallbacksMP.ON_PRE_RUN, session.begin_run),
        (CallbacksMP.ON_CLEANUP, session.end_run),
    ):
        model.add_callback_with_key(event, KEY, _without_argument(action))
    return model


def find_session(model: Any) -> Session | None:
    """The session of a MODEL that ``install`` made, or of a copy of it; None if there is none."""
    from comfy.patcher_extension import WrappersMP

    # Not through the override: another node may have put its own in that place since.
    wrappers = model.get_wrappers(WrappersMP.APPLY_MODEL, KEY)
    return getattr(wrappers[-1], KEY, None) if wrappers else None


def make_override(session: Session) -> Callable[..., torch.Tensor]:
    """The override of ``session``; carries it as attribute ``sageattention3``."""
    host = session.previous

    def override(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = read_call(*args, **kwargs)
        options = kwargs.get("transformer_options") or {}
        in_window = options.get(session.key)
        if in_window is None:
            layer, choice = "outside", Choice.host("called outside of the model's forward pass")
        else:
            who = session.identify(options, call.q_len, call.kv_len)
            layer, choice = who.id, session.choose(call, who, in_window)

        out = None
        if choice.backend is not None:
            out, choice = _compute(session, call, choice)
        if torch.compiler.is_compiling():
            session.compiled.mark(layer, *choice.outcome)
        # The engine runs within a backward pass: a checkpoint recomputes what was counted before.
        elif torch._C._current_graph_task_id() == -1:
            session.ledger.record(layer, *choice.outcome)
        if out is not None:
            return call.finish(out)
        return func(*args, **kwargs) if host is None else host(func, *args, **kwargs)

    setattr(override, KEY, session)
    return override


def _compute(
    session: Session, call: AttentionCall, choice: Choice
) -> tuple[torch.Tensor | None, Choice]:
    """The attention as ``choice`` says; None, and the host's turn, if the backend failed."""
    q, k, v, mask, scale = call.q, call.k, call.v, call.mask, call.scale
    if choice.trainable:
        # Nothing is caught here: a recomputing checkpoint stops by raising through this call, and
        # the host's attention would save other tensors than the first pass did.
        return attention_trainable(q, k, v, mask=mask, scale=scale, backend=choice.backend), choice
    compute = partial(
        attention,
        q,
        k,
        v,
        precision=choice.precision,
        mask=mask,
        scale=scale,
        backend=choice.backend,
    )
    if torch.compiler.is_compiling():
        return compute(), choice
    try:
        out = compute()
    except Exception as error:
        if _is_out_of_memory(error):
            raise  # the host frees memory and tells the user; a second attempt would hide why
        return None, session.give_up_on(choice.backend, error)
    if call.ignored:
        session.ledger.current.notes[_ignored_note(call.ignored)] = None
    return out, choice


def _is_out_of_memory(error: Exception) -> bool:
    # Drivers also report it as a plain error of an asynchronous call.
    return isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error).lower()


def _ignored_note(names: tuple[str, ...]) -> str:
    return (
        f"the model passes arguments that this version does not know and did not use: "
        f"{', '.join(names)}"
    )


def _forward_wrapper(session: Session) -> Callable:
    def begin(
        model_sampling: Any, sigma: float, options: dict[str, Any], conditions: list[str]
    ) -> dict[str, Any]:
        top = options.get(OPTION)
        if getattr(top, KEY, None) is not session:
            session.ledger.current.replaced_by = _name(top)
        return session.begin_forward(model_sampling, sigma, options, conditions)

    wrapper = forward_wrapper(begin, session.end_forward)
    setattr(wrapper, KEY, session)
    return wrapper


def _name(override: Callable | None) -> str:
    """Where a foreign override comes from, for a message: ``module.function``."""
    if override is None:
        return "it was removed"
    return f"{getattr(override, '__module__', '?')}.{getattr(override, '__qualname__', override)}"


def _without_argument(action: Callable[[], None]) -> Callable:
    def callback(_model: Any) -> None:
        action()

    return callback
