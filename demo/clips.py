"""Draws the clips that the demo's video model learns: a shape that moves over a textured ground.

Everything follows from a generator's seed and is drawn on its device, many clips at once.
"""

import math
from functools import cache
from typing import NamedTuple

import torch

from .shapes import REACH, distance_maps
from .words import CATEGORIES, first_of

SIZE = 128  # pixels, both ways
PERIOD = 1 / 8  # of a texture, in widths of the picture
COLOURS = {
    "red": (0.95, 0.15, 0.15),
    "green": (0.15, 0.80, 0.20),
    "blue": (0.20, 0.35, 1.00),
    "yellow": (1.00, 0.90, 0.15),
    "white": (0.97, 0.97, 0.97),
    "purple": (0.70, 0.20, 0.90),
    "cyan": (0.20, 0.90, 0.95),
    "orange": (1.00, 0.55, 0.10),
}
GROUND_DARK, GROUND_BRIGHT = 0.25, 0.50  # the ground's share of its colour: shapes stand out


class Scenes(NamedTuple):
    """What is drawn.

    words: [B, categories], rows of the vocabulary. centre: [B, 2], where the shape is in the middle
    of the clip, and radius: [B], in widths. tilt: [B], radians. phase: [B, 2], of the texture, in
    periods. turn: [B], 1 or -1.
    """

    words: torch.Tensor
    centre: torch.Tensor
    radius: torch.Tensor
    tilt: torch.Tensor
    phase: torch.Tensor
    turn: torch.Tensor


def random_scenes(count: int, generator: torch.Generator) -> Scenes:
    """Scenes of any prompt whose ground has another colour than the shape."""
    device = generator.device

    def pick(choices: int) -> torch.Tensor:
        return torch.randint(choices, (count,), generator=generator, device=device)

    def between(low: float, high: float, *shape: int) -> torch.Tensor:
        numbers = torch.rand(count, *shape, generator=generator, device=device)
        return low + (high - low) * numbers

    picked = {name: pick(len(known)) for name, known in CATEGORIES.items()}
    colours = len(COLOURS)
    picked["ground"] = (picked["colour"] + 1 + pick(colours - 1)) % colours
    words = torch.stack([first_of(name) + picked[name] for name in CATEGORIES], 1)
    return Scenes(
        words,
        between(0.45, 0.55, 2),
        between(0.22, 0.27),
        between(-0.08, 0.08),
        between(0.0, 1.0, 2),
        2.0 * pick(2) - 1.0,
    )


def draw(scenes: Scenes, times: torch.Tensor, size: int = SIZE) -> torch.Tensor:
    """The clips, [B, 3, T, size, size], FP32 in 0..1. times: [B, T], 0 is the start, 1 the end."""
    device = scenes.words.device
    picked = {name: scenes.words[:, i] - first_of(name) for i, name in enumerate(CATEGORIES)}
    line = (torch.arange(size, device=device) + 0.5) / size
    y, x = torch.meshgrid(line, line, indexing="ij")
    palette, maps = _made_once(device)
    share = _textures(scenes, picked["texture"], x, y, size)
    share = GROUND_DARK + (GROUND_BRIGHT - GROUND_DARK) * share
    ground = palette[picked["ground"]][:, :, None, None] * share[:, None]

    centre, radius, angle = _move(scenes, picked["motion"], times)
    dx = (x - centre[..., 0, None, None]) / radius[..., None, None]
    dy = (y - centre[..., 1, None, None]) / radius[..., None, None]
    cos, sin = angle.cos()[..., None, None], angle.sin()[..., None, None]
    place = torch.stack((cos * dx + sin * dy, cos * dy - sin * dx), -1) / REACH
    batch, frames = times.shape
    distance = torch.nn.functional.grid_sample(
        maps[picked["shape"]][:, None],
        place.reshape(batch, frames * size, size, 2),
        padding_mode="border",
        align_corners=False,
    ).reshape(batch, frames, size, size)
    covered = (0.5 - distance * radius[..., None, None] * size).clamp(0, 1)[:, None]
    shape = palette[picked["colour"]][:, :, None, None, None]
    return ground[:, :, None] * (1 - covered) + shape * covered


@cache
def _made_once(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Colours and shapes: to make them takes longer than to draw a batch of clips."""
    palette = torch.tensor(list(COLOURS.values()), device=device)
    return palette, distance_maps(CATEGORIES["shape"]).to(device)


def _textures(scenes: Scenes, texture: torch.Tensor, x, y, size: int) -> torch.Tensor:
    """[B, size, size], 0 where a ground is dark, 1 where it is bright."""
    u, v = (
        2 * math.pi * (line / PERIOD + scenes.phase[:, i, None, None])
        for i, line in ((0, x), (1, y))
    )
    steep = PERIOD * size / (2 * math.pi)  # edges about a pixel wide
    stripes = 0.5 + steep * (u + v).sin()
    checks = 0.5 + steep * (u / 2).sin() * (v / 2).sin()
    dots = 0.5 + steep * (0.7 - torch.hypot((u / 2).sin(), (v / 2).sin()))
    kinds = torch.stack((torch.full_like(u, 0.5), stripes, checks, dots)).clamp(0, 1)
    return kinds[texture, torch.arange(len(texture), device=texture.device)]


def _move(scenes: Scenes, motion: torch.Tensor, times: torch.Tensor):
    """Centre [B, T, 2], radius [B, T] and angle [B, T] of the shapes at ``times``."""
    is_ = {name: (motion == i)[:, None] for i, name in enumerate(CATEGORIES["motion"])}
    way = 0.42 * (times - 0.5)
    circle = 2 * math.pi * times * scenes.turn[:, None]
    x = way * is_["right"].float() - way * is_["left"].float()
    y = way * is_["down"].float() - way * is_["up"].float()
    x = x + 0.2 * circle.cos() * is_["circling"]
    y = y + 0.2 * circle.sin() * is_["circling"]
    centre = scenes.centre[:, None] + torch.stack((x, y), -1)
    radius = scenes.radius[:, None] * torch.where(is_["growing"], 0.5 + 1.1 * times, 1.0)
    spin = math.pi * times * scenes.turn[:, None] * is_["spinning"]
    return centre, radius, scenes.tilt[:, None] + spin
