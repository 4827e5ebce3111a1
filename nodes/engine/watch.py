"""A MODEL or GUIDER that a calibration watches, and how it gets there."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from .calibration import Calibration
from .call import read_call
from .layers import LayerTracker
from .layout import Layout
from .override import KEY, OPTION


def watch_model(model: Any, calibration: Calibration, layout: Layout) -> Any:
    """A clone of ``model`` (ModelPatcher) whose sampling ``calibration`` sees.

    A SageAttention3 patch on it is taken off: what is measured is the full precision. Another
    node's attention override stays and is what the host's attention means.
    """
    from comfy.patcher_extension import WrappersMP

    tracker = LayerTracker(layout)
    model = model.clone()
    options = model.model_options.setdefault("transformer_options", {})
    previous = options.get(OPTION)
    previous = getattr(previous, KEY).previous if hasattr(previous, KEY) else previous
    options[OPTION] = _override(calibration, tracker, previous)
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, _naming_wrapper(tracker))
    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, _evaluation_wrapper(calibration))
    return model


def watch_guider(guider: Any, calibration: Calibration, layout: Layout) -> Any:
    """A copy of ``guider`` (CFGGuider) whose model is watched."""
    guider = copy.copy(guider)
    guider.model_patcher = watch_model(guider.model_patcher, calibration, layout)
    guider.model_options = guider.model_patcher.model_options
    return guider


def _override(
    calibration: Calibration, tracker: LayerTracker, previous: Callable | None
) -> Callable[..., torch.Tensor]:
    def override(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        def host() -> torch.Tensor:
            return previous(func, *args, **kwargs) if previous else func(*args, **kwargs)

        call = read_call(*args, **kwargs)
        options = kwargs.get("transformer_options") or {}
        layer = tracker.identify(options, call.q_len, call.kv_len)
        return calibration.attend(call, layer, host)

    return override


def _naming_wrapper(tracker: LayerTracker) -> Callable:
    """An APPLY_MODEL wrapper that makes the calls of a forward pass known by name."""

    def wrapper(
        executor,
        x,
        t,
        c_concat=None,
        c_crossattn=None,
        control=None,
        transformer_options=None,
        **kw,
    ):
        given = [name for name, value in kw.items() if value is not None]
        options = tracker.begin_forward(transformer_options or {}, given)
        return executor(x, t, c_concat, c_crossattn, control, options, **kw)

    return wrapper


def _evaluation_wrapper(calibration: Calibration) -> Callable:
    """A PREDICT_NOISE wrapper: around the model and its guidance, once per evaluation."""

    def wrapper(executor, x, timestep, model_options=None, seed=None):
        model_options = model_options or {}
        guider = executor.class_obj
        return calibration.evaluate(
            lambda: executor(x, timestep, model_options, seed),
            timestep.flatten()[0].item(),
            model_options["transformer_options"],
            guider.model_patcher.get_model_object("model_sampling"),
        )

    return wrapper
