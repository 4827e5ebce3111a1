"""Models at their true size, and what people make with them: what end_to_end.py runs.

Widths are those that the host reads from the public checkpoints. Weights are random: how long a
step takes does not depend on them.
"""

from dataclasses import replace
from typing import NamedTuple

from ..demo.families import FAMILIES, Family, Text


class Workload(NamedTuple):
    """A model at work.

    family: the model, at the size of the latent that it starts from. steps: as many are measured,
    after one that is not. cfg: of the sampler; above 1 each step is for two prompts at once. bar:
    the step time to reach, as a part of the step time with the host's attention.
    """

    name: str
    family: Family
    steps: int
    cfg: float = 1.0
    bar: float | None = None


def _full(name: str, text: Text, **widths: object) -> Family:
    family = FAMILIES[name]
    return replace(family, config={**family.config, **widths}, text=text)


# As text encoders of the host deliver them: T5's padding makes 256 tokens for Flux, of which long
# prompts fill 512; without padding, for HunyuanVideo and Qwen-Image, it is the prompt's own length.
FLUX = _full(
    "flux",
    Text(4096, pooled=768, tokens=512),
    vec_in_dim=768,
    context_in_dim=4096,
    hidden_size=3072,
    num_heads=24,
    depth=19,
    depth_single_blocks=38,
)
HUNYUAN_VIDEO = _full(
    "hunyuan_video",
    Text(4096, pooled=768, tokens=256),
    context_in_dim=4096,
    hidden_size=3072,
    num_heads=24,
    depth=20,
    depth_single_blocks=40,
)
WAN = _full("wan_t2v", Text(4096, tokens=512), dim=5120, ffn_dim=13824, num_heads=40, num_layers=40)
SD3_LARGE = _full(
    "sd3",
    Text(4096, pooled=2048, tokens=154),
    depth=38,
    context_embedder_config={
        "target": "torch.nn.Linear",
        "params": {"in_features": 4096, "out_features": 2432},
    },
    num_patches=192 * 192,
    pos_embed_max_size=192,
    x_block_self_attn_layers=[],
)
QWEN_IMAGE = _full(
    "qwen_image",
    Text(3584, tokens=128),
    num_layers=60,
    num_attention_heads=24,
    joint_attention_dim=3584,
)


def _image(family: Family, width: int, height: int) -> Family:
    """Sizes in pixels."""
    channels, *frames = family.latent[:-2]
    return replace(family, latent=(channels, *frames, height // 8, width // 8))


def _video(family: Family, width: int, height: int, frames: int) -> Family:
    """Sizes in pixels; both models make one latent of the first frame and of each four more."""
    return replace(
        family, latent=(family.latent[0], (frames - 1) // 4 + 1, height // 8, width // 8)
    )


# The same model stands side by side, so that it is built once. Guidance is as the models are used,
# but for Wan: two prompts would take twice the time, with the same share of attention.
WORKLOADS = (
    Workload("Flux-dev, 1024 px", _image(FLUX, 1024, 1024), 4, bar=0.98),
    Workload("Flux-dev, 2048 px", _image(FLUX, 2048, 2048), 2, bar=0.88),
    Workload("SD 3.5 large, 1024 px", _image(SD3_LARGE, 1024, 1024), 4, cfg=4.5),
    Workload("Qwen-Image, 1328 px", _image(QWEN_IMAGE, 1328, 1328), 2, cfg=2.5),
    Workload("Wan 2.1 14B, 480p, 81 frames", _video(WAN, 832, 480, 81), 1),
    Workload("Wan 2.1 14B, 720p, 81 frames", _video(WAN, 1280, 720, 81), 1, bar=0.70),
    Workload("HunyuanVideo, 544p, 85 frames", _video(HUNYUAN_VIDEO, 960, 544, 85), 1, bar=0.80),
    Workload("HunyuanVideo, 720p, 129 frames", _video(HUNYUAN_VIDEO, 1280, 720, 129), 1, bar=0.66),
)
