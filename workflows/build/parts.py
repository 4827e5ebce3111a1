"""What several workflows share: public files, and the columns that this pack adds.

Models, files and sampler settings follow ComfyUI's own templates for the same models.
"""

from typing import Any

from .sheet import ORANGE, PURPLE, Model, Node, Output, Sheet

HUB = "https://huggingface.co"
FLUX_TEXT = f"{HUB}/comfyanonymous/flux_text_encoders/resolve/main"
HUNYUAN = f"{HUB}/Comfy-Org/HunyuanVideo_repackaged/resolve/main/split_files"
WAN = f"{HUB}/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"
QWEN = f"{HUB}/Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files"

COMPARE = (
    "The seed is fixed: switch **enabled** off in the Patch and run again to compare with the "
    "untouched model."
)


def model(directory: str, name: str, base: str) -> Model:
    return Model(name=name, directory=directory, url=f"{base}/{name}")


CLIP_L = model("text_encoders", "clip_l.safetensors", FLUX_TEXT)
T5 = model("text_encoders", "t5xxl_fp16.safetensors", FLUX_TEXT)


def patch(sheet: Sheet, source: Output, preset: str, advice: str, **profile: Any) -> Node:
    """The column that this pack adds before the sampler. profile: further inputs of the Patch."""
    sheet.column(330)
    with sheet.group("SageAttention3", ORANGE):
        patched = sheet.add("SageAttention3Patch", model=source, preset=preset, **profile)
    sheet.note(f"{advice}\n\n{COMPARE}", 140)
    return patched


def report(sheet: Sheet, samples: Output, patched: Node) -> Node:
    """The column that this pack adds after the sampler."""
    sheet.column(560)
    with sheet.group("What ran", ORANGE):
        return sheet.add(
            "SageAttention3Report", samples=samples, model=patched["MODEL"], min_height=520
        )


def prompt(sheet: Sheet, clip: Output, text: str, title: str = "Prompt", height: int = 150) -> Node:
    return sheet.add("CLIPTextEncode", title=title, clip=clip, text=text, min_height=height)


def save_image(sheet: Sheet, samples: Output, vae: Output, prefix: str) -> None:
    sheet.column(400)
    with sheet.group("Image", PURPLE):
        image = sheet.add("VAEDecode", samples=samples, vae=vae)
        sheet.add("SaveImage", images=image["IMAGE"], filename_prefix=prefix, min_height=390)


def save_video(sheet: Sheet, images: Output, fps: int, prefix: str) -> None:
    video = sheet.add("CreateVideo", images=images, fps=fps)
    sheet.add("SaveVideo", video=video["VIDEO"], filename_prefix=f"video/{prefix}", min_height=330)
