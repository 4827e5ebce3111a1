"""The node that measures attention on the user's own GPU."""

from collections.abc import Iterator, Sequence

import torch

from ..kernels import capabilities
from ..kernels.shapes import Shape, random_qkv
from ..kernels.timing import ROUNDS, GpuTimer
from .engine.speed import (
    MENU,
    Speed,
    advise,
    measure_shape,
    native_precisions,
    speed_table,
    why_nothing_native,
)
from .engine.speed_chart import speed_chart
from .shown import shown

# Queries, keys, values, their quantised copies, the output, and what the host's way may need.
TENSORS_HELD = 8
NO_GPU = (
    "There is no NVIDIA GPU here that PyTorch can use, so nothing was measured and the patch can't "
    "be faster; with emulation on it shows what quantisation does to a picture."
)


class SageAttention3Benchmark:
    TITLE = "SageAttention3 Benchmark"
    CATEGORY = "SageAttention3"
    DESCRIPTION = (
        "Times attention on this GPU in each precision, at the sizes of known models, beside "
        "ComfyUI's own attention, and says which preset to use. Takes seconds to a minute."
    )
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("chart", "report")
    OUTPUT_TOOLTIPS = (
        "Bars: how many times as fast as ComfyUI's own attention.",
        "Which preset to use here, and a table of milliseconds.",
    )
    OUTPUT_NODE = True
    FUNCTION = "measure"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {
            "required": {
                "models": (
                    list(MENU),
                    {
                        "default": "image models",
                        "tooltip": "Whose attention to time: one layer of each, at a megapixel or "
                        "five to six seconds of video. Video models need a few gigabytes.",
                    },
                ),
                "rounds": (
                    "INT",
                    {
                        "default": ROUNDS,
                        "min": 1,
                        "max": 100,
                        "tooltip": "How often each precision has its turn; the median counts. "
                        "More is steadier and slower. Change it to measure again.",
                    },
                ),
            }
        }

    def measure(self, models: str, rounds: int) -> dict:
        from comfy.model_management import get_torch_device, get_torch_device_name

        device = get_torch_device()
        found = capabilities(device)
        precisions = native_precisions(found)
        speeds: list[Speed] = []
        if precisions:
            speeds = list(_measure_all(MENU[models], precisions, device, rounds))
            text = f"{advise(speeds, precisions)}\n\n{speed_table(speeds, precisions)}"
        elif device.type == "cuda":
            text = f"Leave SageAttention3 off for speed: {why_nothing_native(found)}."
        else:
            text = NO_GPU
        image = speed_chart(speeds, precisions, get_torch_device_name(device))
        return {"ui": shown(text, image), "result": (image, text)}


def _measure_all(
    shapes: Sequence[Shape], precisions: Sequence[str], device: torch.device, rounds: int
) -> Iterator[Speed]:
    from comfy.model_management import free_memory, throw_exception_if_processing_interrupted
    from comfy.utils import ProgressBar

    progress = ProgressBar(len(shapes))
    timer = GpuTimer(device)
    for shape in shapes:
        throw_exception_if_processing_interrupted()
        elements = shape.batch * shape.heads * shape.tokens * shape.head_dim
        free_memory(TENSORS_HELD * 2 * elements, device)
        yield measure_shape(shape, random_qkv(shape, device), precisions, _host, timer, rounds)
        progress.update(1)


def _host(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The attention that the host has chosen for all models, as Flux calls it."""
    from comfy.ldm.modules.attention import optimized_attention

    return optimized_attention(q, k, v, q.shape[1], skip_reshape=True)
