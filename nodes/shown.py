"""What a node of ours shows on itself: a text and pictures."""

from typing import Any

import torch


def shown(text: str, pictures: torch.Tensor, **more: Any) -> dict[str, Any]:
    """The ``ui`` part of a node's answer. ``web/js/shown_text.js`` shows the text.

    pictures: [B, H, W, 3], saved where previews are. more: further lists, for scripts.
    """
    from nodes import PreviewImage  # ComfyUI's nodes.py, which must not be imported before it is

    saved = PreviewImage().save_images(pictures, "sageattention3")["ui"]
    return {"text": (text,), **more, **saved}
