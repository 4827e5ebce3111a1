"""The chart of a profile has the right bars in the right colours, at every size of model."""

import math

import pytest
import torch
from sageattention3.nodes.engine.budget import choose
from sageattention3.nodes.engine.charts import COLOURS
from sageattention3.nodes.engine.error_chart import KEPT, error_chart

from .profiles import NAN, profile_of

HEADER = 110  # pixels that title and legend take
PRECISIONS = ("fp4", "int8_fp4", "int8")


def count(image, colour):
    """Pixels of ``colour`` below the legend."""
    rgb = torch.tensor([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int(((image[0, HEADER:] - rgb).abs().amax(-1) < 1 / 512).sum())


def drawn(errors, max_error, candidates=PRECISIONS):
    profile = profile_of(errors)
    return error_chart(profile, choose(profile, max_error, candidates))


@pytest.mark.parametrize("layers", [1, 5, 60])
def test_a_picture_of_any_size_is_an_image_in_range(layers):
    image = drawn({p: {f"double.{i}": 0.1 for i in range(layers)} for p in PRECISIONS}, 9.0)
    assert image.dtype == torch.float32
    assert image.shape[0] == 1
    assert image.shape[1] > 20 * layers
    assert image.min() >= 0
    assert image.max() <= 1
    assert count(image, COLOURS["fp4"]) > 1000 * layers


def test_only_the_chosen_precision_is_drawn_solid():
    errors = {p: {"double.0": 0.1, "double.1": 0.1} for p in PRECISIONS}
    for precision in PRECISIONS:
        image = drawn(errors, 9.0, (precision,))
        assert {p for p in PRECISIONS if count(image, COLOURS[p]) > 100} == {precision}


def test_a_layer_that_stays_in_fp16_has_pale_bars_and_its_name_marked():
    errors = {"fp4": {"double.0": 0.1, "double.1": 0.2}}
    free, tight = drawn(errors, 9.0), drawn(errors, 0.15)
    assert count(free, KEPT) == 0
    assert count(tight, KEPT) > 20
    assert count(tight, COLOURS["fp4"]) < count(free, COLOURS["fp4"])


def test_a_longer_bar_is_a_larger_error():
    image = drawn({"fp4": {"double.0": 0.4, "double.1": 0.1}}, 9.0)
    rgb = torch.tensor([int(COLOURS["fp4"][i : i + 2], 16) for i in (1, 3, 5)]) / 255
    mask = ((image[0, HEADER:] - rgb).abs().amax(-1) < 1 / 512).float()
    lengths = mask.sum(1)
    rows = lengths.nonzero().flatten()
    assert lengths[rows[2]] > lengths[rows[-3]] + 20


@pytest.mark.parametrize("error", [NAN, math.inf, 0.0])
def test_a_layer_without_a_size_of_its_error_can_be_drawn(error):
    image = drawn({"fp4": {"double.0": error, "double.1": 0.1}}, 9.0)
    assert image.isfinite().all()
    assert drawn({"fp4": {"double.0": error}}, 9.0).isfinite().all()
