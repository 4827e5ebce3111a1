"""What a patch and a calibration both put on a MODEL: an attention override and wrappers.

A MODEL carries one set of ours: what comes later takes the place of what was there. Another node's
override stays below and serves the calls that are left to the host.
"""

from collections.abc import Callable
from typing import Any

OPTION = "optimized_attention_override"
KEY = "sageattention3"  # of our wrappers and callbacks on a MODEL, and of our mark on an override


def clone_without_ours(model: Any) -> tuple[Any, Callable | None]:
    """A clone of ``model`` (ModelPatcher) with nothing of ours, and another node's override.

    The override is taken out of the clone, for whoever sets the next one to call.
    """
    clone = model.clone()
    override = clone.model_options.setdefault("transformer_options", {}).pop(OPTION, None)
    if hasattr(override, KEY):
        override = getattr(override, KEY).previous
    for kind in list(clone.wrappers):
        clone.remove_wrappers_with_key(kind, KEY)
    for event in list(clone.callbacks):
        clone.remove_callbacks_with_key(event, KEY)
    return clone, override


def set_override(model: Any, override: Callable) -> None:
    model.model_options["transformer_options"][OPTION] = override


def forward_wrapper(
    begin: Callable[[Any, float, dict, list[str]], dict], end: Callable[[], None] = lambda: None
) -> Callable:
    """An APPLY_MODEL wrapper: the host runs it eagerly, around every pass through the model.

    begin(model_sampling, sigma, transformer_options, conditions) answers with the options of the
    pass; conditions are the names of the model inputs that are given.
    """

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
        options = begin(
            executor.class_obj.model_sampling,
            t.flatten()[0].item(),
            transformer_options or {},
            [name for name, value in kw.items() if value is not None],
        )
        try:
            return executor(x, t, c_concat, c_crossattn, control, options, **kw)
        finally:
            end()

    return wrapper
