"""The square picture that the template browser shows for a workflow."""

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ...demo.frontend import CROP_PAD
from .sheet import ORANGE, TITLE

SIDE = 480  # pixels; the browser shows it at about half of that
MARGIN = 16
BACKGROUND = "#1b1b1f"
FOCUS = "SageAttention3"  # the group shown large


def compose(title: str, workflow: dict[str, Any], graph: Image.Image, path: Path) -> None:
    """Write the thumbnail: ``title``, the whole graph, and the Patch large enough to read.

    graph: the frontend's screenshot of ``workflow``, cropped to the graph.
    """
    picture = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    draw = ImageDraw.Draw(picture)
    model, _, task = title.partition(", ")
    draw.text((MARGIN, 14), model, "white", ImageFont.load_default(40))
    draw.text((MARGIN, 62), task, ORANGE, ImageFont.load_default(22))

    room = SIDE - 2 * MARGIN
    strip = graph.convert("RGB")
    strip.thumbnail((room, SIDE // 3), Image.Resampling.LANCZOS)
    picture.paste(strip, ((SIDE - strip.width) // 2, 104))

    top = 104 + strip.height + MARGIN
    focus = graph.convert("RGB").crop(_focus_box(workflow, graph.width))
    focus = focus.resize((room, round(focus.height * room / focus.width)), Image.Resampling.LANCZOS)
    picture.paste(focus.crop((0, 0, room, SIDE - top)), (MARGIN, top))
    picture.save(path, quality=85, optimize=True)


def _focus_box(workflow: dict[str, Any], width: int) -> tuple[int, int, int, int]:
    """Where the Patch's group is in the screenshot, as left, top, right, bottom in pixels."""
    boxes = [group["bounding"] for group in workflow["groups"]]
    boxes += [
        [x, y - TITLE, w, h + TITLE]
        for (x, y), (w, h) in ((node["pos"], node["size"]) for node in workflow["nodes"])
    ]
    left = min(box[0] for box in boxes)
    top = min(box[1] for box in boxes)
    right = max(box[0] + box[2] for box in boxes)
    scale = (width - 2 * CROP_PAD) / (right - left)
    x, y, w, h = next(g["bounding"] for g in workflow["groups"] if g["title"] == FOCUS)
    edges = (x - left, y - top, x + w - left, y + h - top)
    return tuple(round(edge * scale) + CROP_PAD for edge in edges)
