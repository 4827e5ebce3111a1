"""QA-44: video that flickers, or shows the kernels' tiles as a mosaic, after quantisation."""

from functools import cache

import pytest
import torch
from sageattention3.kernels import attention
from sageattention3.nodes.engine.comparison import compare_motion

from .calls import QUANTISED, Patched, exact, packed

pytestmark = pytest.mark.host

FRAMES, HEIGHT, WIDTH = 8, 10, 18  # a frame is no multiple of a tile, as in real models
TOKENS = FRAMES * HEIGHT * WIDTH
HEADS, CHANNELS = 4, 64
TILE = 128
FLICKER = 1.5  # times the temporal error of INT8


@cache
def clip():
    """q, k, v [1, heads, tokens, channels] of a scene that moves slowly.

    Tokens are ordered by frame, row and column. Neighbours in space and time are alike, every token
    has noise of its own, and all keys share a bias, as in video models.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = (FRAMES, HEIGHT, WIDTH)
    grid = torch.meshgrid(*(torch.arange(size) / size for size in sizes), indexing="ij")
    places = torch.stack(grid, -1).reshape(TOKENS, 3) * torch.tensor([3.0, 6.0, 6.0])
    waves = places @ torch.randn(3, CHANNELS, generator=generator)
    scene = torch.cat([waves.sin(), waves.cos()], -1)
    scene += 0.1 * torch.randn(scene.shape, generator=generator)

    def projected(gain):
        weights = torch.randn(HEADS, 2 * CHANNELS, CHANNELS, generator=generator)
        return scene @ weights * gain / (2 * CHANNELS) ** 0.5

    q, k, v = projected(2.0), projected(2.0), projected(1.0)
    k += 2 * torch.randn(HEADS, 1, CHANNELS, generator=generator)
    return tuple(x.half()[None] for x in (q, k, v))


@cache
def reference():
    return exact(*clip())


@cache
def quantised(precision):
    return attention(*clip(), precision=precision)


def temporal_error(out):
    """Relative L1 of frame t+1 minus frame t, against full precision."""

    def frames(x):
        return packed(x.double()).reshape(1, FRAMES, -1)

    return compare_motion(frames(reference()), frames(out)).error


def test_balanced_does_not_flicker_more_than_int8_and_fp4_everywhere_would():
    call = Patched(preset="balanced")
    out = call(*clip(), HEADS, skip_reshape=True, skip_output_reshape=True)
    assert call.precisions != ["fp16"], "the clip is long enough for min_tokens"
    int8 = temporal_error(quantised("int8"))
    assert 0 < temporal_error(out) <= FLICKER * int8
    assert temporal_error(quantised("fp4")) > FLICKER * int8, "the bar tells them apart"


def repetition(error, period):
    """Mean autocorrelation of ``error`` [tokens] at the multiples of ``period``."""
    error = error - error.mean()
    lags = range(period, TOKENS // 2, period)
    products = torch.stack([(error[lag:] * error[:-lag]).mean() for lag in lags])
    return (products.mean() / error.square().mean()).item()


def tile_peak(error):
    """How far the tile's period stands out among its neighbours, in their standard deviations."""
    periods = [period for period in range(TILE - 31, TILE + 32) if abs(period - TILE) > 1]
    others = torch.tensor([repetition(error, period) for period in periods])
    return ((repetition(error, TILE) - others.mean()) / others.std()).item()


CLEAR = 3.0  # standard deviations
IN_TILE = torch.arange(TOKENS) % TILE


@pytest.mark.parametrize("precision", QUANTISED)
def test_the_error_does_not_repeat_with_the_tiles(precision):
    error = (quantised(precision).double() - reference()).abs().mean((1, 3)).flatten()
    assert error.all()
    assert tile_peak(error) < CLEAR
    # The same error, half as much again at the beginning of every tile or in half of it, is seen.
    for part in (IN_TILE < 4, IN_TILE < TILE // 2):
        assert tile_peak(error * (1 + 0.5 * part)) > CLEAR
