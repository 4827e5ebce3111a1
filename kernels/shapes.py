"""Attention calls as models make them: what benchmarks time."""

from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """One attention call: [batch, heads, tokens, head_dim], bf16."""

    name: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    causal: bool = False

    @property
    def flops(self) -> float:
        """Of both matrix products; half of them where the call is causal."""
        products = 4 * self.batch * self.heads * self.tokens**2 * self.head_dim
        return products / 2 if self.causal else products


# The self-attention of one layer, at the size that its authors show: pictures of a megapixel, five
# or six seconds of video.
IMAGE_MODELS = (Shape("SDXL", 2, 10, 4096, 64), Shape("Flux", 1, 24, 4608, 128))
VIDEO_MODELS = (
    Shape("CogVideoX", 2, 48, 17776, 64),
    Shape("Wan 2.1 14B", 1, 40, 32760, 128),
    Shape("HunyuanVideo", 1, 24, 118800, 128),
)


def random_qkv(shape: Shape, device: torch.device | str = "cuda") -> list[torch.Tensor]:
    """q, k, v as models make them: token-major in memory. The same numbers every time."""
    generator = torch.Generator(device).manual_seed(0)
    size = shape.batch, shape.tokens, shape.heads, shape.head_dim
    options = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    return [torch.randn(size, **options).transpose(1, 2) for _ in range(3)]
