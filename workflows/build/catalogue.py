"""Every shipped workflow by its file's stem, and its text as shipped."""

import json
from collections.abc import Callable

from ...demo.graph import ObjectInfo
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
