"""Clips to latents and back by a fixed linear map: the demo's video model needs no VAE.

Each 4 x 4 pixels of a frame become the 16 channels of one cell of the host's HunyuanVideo latent,
[B, 16, frames, height / 4, width / 4]: their strongest principal components, by which nothing but
the finest detail is lost. (HunyuanVideo's own VAE makes a cell of 8 x 8 pixels of 4 frames.)
"""

from functools import cache
from typing import NamedTuple

import torch
from einops import rearrange
from safetensors.torch import load_file

from .clips import draw, random_scenes
from .words import MODEL

PATCH = 4
CHANNELS = 16
LATENT_SCALE = 0.476986  # of the host's latent format; the model sees latents times this
# Channels as they are differ in size by orders of magnitude, and the model would learn the first
# ones alone; all at one size, it would spend itself on detail that nobody sees.
EVENING = 0.5
SEED = 11


class Codec(NamedTuple):
    """mean: [pixels], basis: [CHANNELS, pixels] with orthonormal rows, size: [CHANNELS]."""

    mean: torch.Tensor
    basis: torch.Tensor
    size: torch.Tensor

    def encode(self, clips: torch.Tensor) -> torch.Tensor:
        """[B, 3, T, H, W] in 0..1 to [B, CHANNELS, T, H / PATCH, W / PATCH]."""
        patches = _patches(clips) - self.mean
        return (patches @ (self.basis / self.size[:, None]).T).permute(0, 4, 1, 2, 3)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The reverse, clamped to 0..1."""
        cells = latents.permute(0, 2, 3, 4, 1)
        patches = cells @ (self.basis * self.size[:, None]) + self.mean
        clips = rearrange(patches, "b t h w (c p q) -> b c t (h p) (w q)", p=PATCH, q=PATCH)
        return clips.clamp(0, 1)


def fit(clips: int = 256) -> Codec:
    """The codec of seeded random clips' frames, computed on the CPU."""
    generator = torch.Generator().manual_seed(SEED)
    scenes = random_scenes(clips, generator)
    pixels = draw(scenes, torch.rand(clips, 1, generator=generator))
    patches = _patches(pixels).flatten(0, -2).double()
    mean = patches.mean(0)
    centred = patches - mean
    variances, vectors = torch.linalg.eigh(centred.T @ centred / len(patches))
    basis = vectors.T.flip(0)[:CHANNELS]
    strongest = basis.abs().argmax(1, keepdim=True)
    basis = basis * basis.gather(1, strongest).sign()  # one of the two that eigh may return
    deviations = variances.flip(0)[:CHANNELS].sqrt()
    evened = deviations**EVENING
    wanted = evened / evened.square().mean().sqrt() / LATENT_SCALE
    return Codec(mean.float(), basis.float().contiguous(), (deviations / wanted).float())


@cache
def load() -> Codec:
    """The codec that the shipped model was trained with."""
    return Codec(**load_file(MODEL / "codec.safetensors"))


def _patches(clips: torch.Tensor) -> torch.Tensor:
    """[B, 3, T, H, W] to [B, T, H / PATCH, W / PATCH, pixels]."""
    return rearrange(clips, "b c t (h p) (w q) -> b t h w (c p q)", p=PATCH, q=PATCH)
