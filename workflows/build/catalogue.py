"""Every shipped workflow by its file's stem, and its texts as shipped."""

import json
from collections.abc import Callable

from ...demo.graph import ObjectInfo, to_prompt
from .calibration import calibrate_and_compare
from .images import flux_dev, qwen_image, sd3_5_large
from .sheet import Sheet
from .videos import hunyuan_video, ltxv, wan2_1_i2v, wan2_1_t2v

RECIPES: dict[str, Callable[[Sheet], None]] = {
    f"{recipe.__name__}_sageattention3": recipe
    for recipe in (flux_dev, hunyuan_video, wan2_1_t2v, wan2_1_i2v, sd3_5_large, ltxv, qwen_image)
}
RECIPES["calibrate_and_compare"] = calibrate_and_compare


def build(name: str, object_info: ObjectInfo) -> str:
    """The JSON of workflow ``name`` for a host that describes its nodes as ``object_info``."""
    sheet = Sheet(object_info)
    RECIPES[name](sheet)
    return json.dumps(sheet.workflow(name), indent=2) + "\n"


def build_prompt(workflow: str, object_info: ObjectInfo) -> str:
    """The JSON of the prompt that ``workflow``, a text of ``build``, is to the server.

    For those who use the server without the frontend; nodes carry their names for them to read.
    """
    prompt = to_prompt(json.loads(workflow), object_info)
    for node in prompt.values():
        node["_meta"] = {"title": object_info[node["class_type"]]["display_name"]}
    return json.dumps(prompt, indent=2) + "\n"
