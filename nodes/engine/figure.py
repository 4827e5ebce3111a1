"""From a matplotlib figure to a picture of the graph."""

from typing import Any

import torch

DPI = 100


def new_figure(width: float, height: float, **options: Any) -> Any:
    """An empty figure of ``width`` by ``height`` inches.

    Not pyplot's: its global state would be the host's too. Imported here, since matplotlib takes
    half a second, which a graph without a chart never needs.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, **options)
    FigureCanvasAgg(figure)
    return figure


def render(figure: Any) -> torch.Tensor:
    """``figure`` as an image [1, height, width, 3], float32 in 0..1."""
    canvas = figure.canvas
    canvas.draw()
    pixels = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8)
    columns, rows = canvas.get_width_height()
    return pixels.view(1, rows, columns, 4)[..., :3].float() / 255
