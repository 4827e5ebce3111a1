"""Tiny random models of the families that ComfyUI knows, small enough for any CPU.

One entry says what is particular to a family: the host's model class and the widths to build it
with, what its text encoder would deliver, and which latent it starts from. Widths that
the host reads from a checkpoint are shrunk for all; families whose widths the host hard-codes in
its detection (``from_file=False``) can only be built in process.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from . import widths
from .widths import TEXT_TOKENS

FRAMES_AS_BATCH = 4  # models that take frames as batch items are fed this many


@dataclass(frozen=True)
class Text:
    """What the text encoder of a family delivers: [1, tokens, channels] and [1, pooled]."""

    channels: int
    pooled: int = 0
    masked: bool = False  # an attention mask that hides the last third of the tokens
    tokens: int = TEXT_TOKENS


@dataclass(frozen=True)
class Family:
    """How to build and feed a tiny model.

    model: class name in ``comfy.supported_models``. config: the widths, over the class's own.
    latent: shape of the latent without batch: (channels[, frames], height, width).
    latent_node: the node that makes such a latent in a graph, and its inputs without sizes.
    conditions: further inputs of ``apply_model``: a tuple is the shape of random numbers, anything
    else is given as it is. metadata: that of the checkpoint file.
    """

    name: str
    model: str
    config: dict[str, Any]
    latent: tuple[int, ...]
    text: Text
    latent_node: str = "EmptySD3LatentImage"
    conditions: dict[str, Any] = field(default_factory=dict)
    workflow: str = ""  # file stem in workflows/
    from_file: bool = False
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        return f"tiny_{self.name}.safetensors"

    def model_node(self) -> dict[str, Any]:
        """The loader of this model in an API prompt; reads the file where the host can."""
        if self.from_file:
            inputs = {"unet_name": self.file_name, "weight_dtype": "default"}
            return {"class_type": "UNETLoader", "inputs": inputs}
        return {"class_type": "SageAttention3DemoModel", "inputs": {"family": self.name}}

    def conditioning_node(self, seed: int = 1) -> dict[str, Any]:
        """What stands in for the text encoder in an API prompt."""
        inputs = {"family": self.name, "seed": seed}
        return {"class_type": "SageAttention3DemoConditioning", "inputs": inputs}

    def empty_latent_node(self, width: int, height: int, length: int = 1) -> dict[str, Any]:
        """The latent to start from in an API prompt; sizes in pixels and frames."""
        inputs = {"width": width, "height": height, "batch_size": 1}
        if len(self.latent) == 4 and self.latent_node != "EmptySD3LatentImage":
            inputs["length"] = length
        return {"class_type": self.latent_node, "inputs": inputs}


IMAGE = (16, 16, 16)
VIDEO = (16, 3, 16, 16)
GUIDANCE = {"guidance": [3.5]}
HUNYUAN_LATENT = "EmptyHunyuanLatentVideo"

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "hunyuan_video",
            "HunyuanVideo",
            widths.HUNYUAN_VIDEO,
            VIDEO,
            Text(64, pooled=768, masked=True),
            HUNYUAN_LATENT,
            GUIDANCE,
            workflow="hunyuan_video_sageattention3",
            from_file=True,
        ),
        Family(
            "wan_t2v",
            "WAN21_T2V",
            {**widths.WAN, "model_type": "t2v"},
            VIDEO,
            Text(4096),
            HUNYUAN_LATENT,
            workflow="wan2_1_t2v_sageattention3",
            from_file=True,
        ),
        Family(
            "wan_i2v",
            "WAN21_I2V",
            {**widths.WAN, "model_type": "i2v", "in_dim": 36},
            VIDEO,
            Text(4096),
            HUNYUAN_LATENT,
            {"c_concat": (20, 3, 16, 16), "clip_fea": (257, 1280)},
            workflow="wan2_1_i2v_sageattention3",
            from_file=True,
        ),
        Family(
            "wan_vace",
            "WAN21_Vace",
            {
                **widths.WAN,
                "model_type": "vace",
                "num_layers": 4,
                "vace_layers": 2,
                "vace_in_dim": 96,
            },
            VIDEO,
            Text(4096),
            HUNYUAN_LATENT,
            {"vace_context": (2, 96, 3, 16, 16), "vace_strength": [1.0, 1.0]},
            from_file=True,
        ),
        Family(
            "sd3",
            "SD3",
            widths.SD3,
            IMAGE,
            Text(4096, pooled=2048),
            workflow="sd3_5_large_sageattention3",
            from_file=True,
        ),
        Family(
            "ltxv",
            "LTXV",
            widths.LTXV,
            (128, 3, 8, 8),
            Text(64, masked=True),
            "EmptyLTXVLatentVideo",
            {"frame_rate": 25},
            workflow="ltxv_sageattention3",
            from_file=True,
            metadata={"config": json.dumps({"transformer": widths.LTXV})},
        ),
        Family(
            "flux",
            "Flux",
            widths.FLUX,
            IMAGE,
            Text(64, pooled=64),
            conditions=GUIDANCE,
            workflow="flux_dev_sageattention3",
        ),
        Family(
            "qwen_image",
            "QwenImage",
            widths.QWEN_IMAGE,
            (16, 1, 16, 16),
            Text(64),
            workflow="qwen_image_sageattention3",
        ),
        Family("chroma", "Chroma", widths.CHROMA, IMAGE, Text(64), conditions={"guidance": [0.0]}),
        Family(
            "sd15",
            "SD15",
            widths.SD15,
            (4, 16, 16),
            Text(768),
            "EmptyLatentImage",
            from_file=True,
        ),
        Family(
            "svd",
            "SVD_img2vid",
            widths.SVD,
            (4, 16, 16),
            Text(32),
            "EmptyLatentImage",
            {
                "c_concat": (4, 16, 16),
                "num_video_frames": FRAMES_AS_BATCH,
                "image_only_indicator": [0.0],
            },
        ),
        Family(
            "lumina2",
            "Lumina2",
            widths.LUMINA2,
            IMAGE,
            Text(64),
            conditions={"num_tokens": TEXT_TOKENS},
        ),
        Family(
            "z_image",
            "ZImage",
            widths.Z_IMAGE,
            IMAGE,
            Text(64),
            conditions={"num_tokens": TEXT_TOKENS},
        ),
        Family(
            "mochi",
            "GenmoMochi",
            widths.MOCHI,
            (12, 3, 16, 16),
            Text(64, masked=True),
            "EmptyMochiLatentVideo",
            {"num_tokens": TEXT_TOKENS},
        ),
        Family(
            "aura_flow", "AuraFlow", widths.AURA_FLOW, (4, 16, 16), Text(64), "EmptyLatentImage"
        ),
        Family(
            "hidream",
            "HiDream",
            widths.HIDREAM,
            IMAGE,
            Text(64, pooled=64),
            conditions={"encoder_hidden_states_llama3": (4, TEXT_TOKENS, 64)},
        ),
        Family(
            "omnigen2",
            "Omnigen2",
            widths.OMNIGEN2,
            IMAGE,
            Text(64),
            conditions={"num_tokens": TEXT_TOKENS},
        ),
        Family(
            "cosmos",
            "CosmosT2V",
            widths.COSMOS1,
            VIDEO,
            Text(64),
            "EmptyCosmosLatentVideo",
            {"fps": 24, "padding_mask": (1, 16, 16)},
        ),
        Family("cosmos_predict2", "CosmosT2IPredict2", widths.COSMOS_PREDICT2, VIDEO, Text(64)),
    )
}
