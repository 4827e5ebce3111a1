"""The node that shows what ran in which precision."""

from typing import Any

import torch

from .engine.charts import heat_strip
from .engine.ledger import Run, Unreported
from .engine.override import find_session
from .engine.session import Session
from .engine.summary import describe_runs
from .shown import shown

NOT_PATCHED = (
    "This model is not patched: all its attention ran in ComfyUI's own way. Connect the MODEL that "
    "comes out of SageAttention3 Patch (and make sure that the node is enabled)."
)


class SageAttention3Report:
    TITLE = "SageAttention3 Report"
    CATEGORY = "SageAttention3"
    DESCRIPTION = (
        "Shows what the model's attention ran in, layer by layer and step by step, and why not "
        "faster. Put it after the sampler."
    )
    RETURN_TYPES = ("LATENT", "STRING", "IMAGE")
    RETURN_NAMES = ("samples", "report", "heat_strip")
    OUTPUT_TOOLTIPS = (
        "The samples, unchanged.",
        "What ran where, as text: one sentence, then a table.",
        "Layers by steps; the colour is the precision.",
    )
    OUTPUT_NODE = True
    # A list of latents is sampled item by item before any of them comes here: one report for all.
    INPUT_IS_LIST = True
    OUTPUT_IS_LIST = (True, False, False)
    FUNCTION = "report"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {
            "required": {
                "samples": (
                    "LATENT",
                    {"tooltip": "From the sampler, so that the report waits for it."},
                ),
                "model": ("MODEL", {"tooltip": "The patched model that the sampler used."}),
            }
        }

    def report(self, samples: list[dict], model: list[Any]) -> dict:
        # By identity: the models of a list are mostly one model, or copies that share its session.
        sessions = {id(session): session for session in map(find_session, model)}
        reports = [_report_of(session) for session in sessions.values()]
        text = "\n\n".join(text for text, _ in reports)
        runs = [(run, news.repeated) for _, news in reports for run in news.runs]
        image = _stack([heat_strip(run) for run, _ in runs or [(Run("nothing to show"), False)]])
        # One list of counts per run, for API clients.
        ledger = [run.rows(repeated) for run, repeated in runs]
        return {"ui": shown(text, image, ledger=ledger), "result": (samples, text, image)}


def _report_of(session: Session | None) -> tuple[str, Unreported]:
    """The text on one patched model and the runs it is about; ``None`` stands for an unpatched."""
    if session is None:
        return NOT_PATCHED, Unreported([])
    news = session.ledger.take_unreported()
    text = describe_runs(
        news.runs, session.expected_layers, repeated=news.repeated, dropped=news.dropped
    )
    return text, news


def _stack(images: list[torch.Tensor]) -> torch.Tensor:
    """One batch of [1, H, W, 3] images of several sizes, on white."""
    height = max(image.shape[1] for image in images)
    width = max(image.shape[2] for image in images)
    batch = torch.ones(len(images), height, width, 3)
    for canvas, image in zip(batch, images, strict=True):
        canvas[: image.shape[1], : image.shape[2]] = image[0]
    return batch
