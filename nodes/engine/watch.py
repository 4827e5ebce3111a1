"""A MODEL or GUIDER that a calibration watches, and how it gets there."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from .attach import KEY, clone_without_ours, forward_wrapper, set_override
from .calibration import Calibration
from .call import read_call
from .layers import LayerTracker
from .layout import Layout

COMPILED = "torch.compile"  # key of the host's wrappers that put a compiled model in place


def watch_model(model: Any, calibration: Calibration, layout: Layout) -> Any:
    """A clone of ``model`` (ModelPatcher) whose sampling ``calibration`` sees.

    A SageAttention3 patch on it is taken off: what is measured is the full precision. So is
    torch.compile, whose code could not be measured call by call. Another node's attention override
    stays and is what the host's attention means. Raises RuntimeError on a host that lets nobody
    stand around a model's guided prediction.
    """
    from comfy.patcher_extension import WrappersMP

    if not hasattr(WrappersMP, "PREDICT_NOISE"):
        raise RuntimeError(
            "This ComfyUI has no wrappers around a model's prediction (PREDICT_NOISE), which a "
            "calibration needs. Update ComfyUI to version 0.3.60 or newer."
        )
    tracker = LayerTracker(layout)

    def name_calls(_sampling: Any, _sigma: float, options: dict, conditions: list[str]) -> dict:
        return tracker.begin_forward(options, conditions)

    model, previous = clone_without_ours(model)
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, COMPILED)
    if hasattr(model.object_patches.get("diffusion_model"), "_orig_mod"):
        del model.object_patches["diffusion_model"]
    set_override(model, _override(calibration, tracker, previous))
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, forward_wrapper(name_calls))
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
