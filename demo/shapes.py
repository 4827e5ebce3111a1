"""The shapes of the demo's clips as signed distances, exact at any size.

Lengths are in units of a shape's radius; distances are negative inside.
"""

import math

import torch

REACH = 1.6  # a map covers -REACH .. REACH in x and y
STROKE = 0.17  # half of it, of a digit's segments

# Segments of a seven-segment digit: top, upper right, lower right, bottom, lower left, upper left,
# middle; each the ends of a line, y downwards.
W, H = 0.48, 0.9
SEGMENTS = (
    ((-W, -H), (W, -H)),
    ((W, -H), (W, 0)),
    ((W, 0), (W, H)),
    ((-W, H), (W, H)),
    ((-W, 0), (-W, H)),
    ((-W, -H), (-W, 0)),
    ((-W, 0), (W, 0)),
)
DIGITS = {
    "one": "0110000",
    "two": "1101101",
    "three": "1111001",
    "four": "0110011",
    "seven": "1110000",
}


def distance_maps(names: tuple[str, ...], size: int = 128) -> torch.Tensor:
    """[len(names), size, size], FP32: y downwards, pixel centres as in ``grid_sample``."""
    line = (torch.arange(size) + 0.5) / size * 2 * REACH - REACH
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([_distance(name, x, y) for name in names])


def _distance(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def circle(radius: float, left: float = 0.0) -> torch.Tensor:
        return torch.hypot(x - left, y) - radius

    if name in DIGITS:
        lit = [line for line, on in zip(SEGMENTS, DIGITS[name], strict=True) if on == "1"]
        return torch.stack([_to_line(x, y, *line) for line in lit]).amin(0) - STROKE
    if name == "circle":
        return circle(0.9)
    if name == "ring":
        return (circle(0.72)).abs() - 0.22
    if name == "moon":
        return torch.maximum(circle(0.95), -circle(0.75, left=0.5))
    return _polygon(x, y, _corners(name))


def _corners(name: str) -> list[tuple[float, float]]:
    if name == "square":
        return [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
    if name == "triangle":
        return [(0.0, -1.0), (0.95, 0.75), (-0.95, 0.75)]
    if name == "star":
        radii = (1.1, 0.45) * 5
        angles = [math.pi * (i / 5 - 0.5) for i in range(10)]
        return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]
    if name == "cross":
        quarter = [(-0.3, -1.0), (0.3, -1.0), (0.3, -0.3)]
        turns = ((1, 0), (0, 1), (-1, 0), (0, -1))
        return [(c * x - s * y, s * x + c * y) for c, s in turns for x, y in quarter]
    raise KeyError(name)


def _to_line(x: torch.Tensor, y: torch.Tensor, start, end) -> torch.Tensor:
    """Distance to the line from ``start`` to ``end``."""
    (ax, ay), (bx, by) = start, end
    dx, dy = bx - ax, by - ay
    along = (((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy)).clamp(0, 1)
    return torch.hypot(x - ax - along * dx, y - ay - along * dy)


def _polygon(x: torch.Tensor, y: torch.Tensor, corners) -> torch.Tensor:
    """Signed distance to a polygon; inside, a ray crosses its edges an odd number of times."""
    nearest = torch.full_like(x, math.inf)
    inside = torch.zeros_like(x, dtype=torch.bool)
    for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
        nearest = torch.minimum(nearest, _to_line(x, y, (ax, ay), (bx, by)))
        if ay != by:
            crosses = ((ay > y) != (by > y)) & (x < (bx - ax) * (y - ay) / (by - ay) + ax)
            inside ^= crosses
    return torch.where(inside, -nearest, nearest)
