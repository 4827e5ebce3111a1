"""The heat strip has the right colour in the right cell, at every size of model and schedule."""

import pytest
import torch
from sageattention3.nodes.engine.charts import COLOURS, heat_strip
from sageattention3.nodes.engine.ledger import HOST, Ledger, Run

HEADER = 80  # pixels that title and legend take


def rgb(colour):
    return torch.tensor([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def where(image, colour):
    """Mask [H, W] of the centres of 5x5 areas of ``colour``: cells and legend, never letters."""
    exact = (image[0] - rgb(colour)).abs().amax(-1) < 1 / 512
    return torch.nn.functional.avg_pool2d(exact[None].float(), 5, 1, 2)[0] > 0.999


def run_of(layers, steps, outcome):
    """outcome(layer number, step) -> (precision, fallback)"""
    ledger = Ledger("model")
    ledger.begin_run()
    for step in range(steps):
        ledger.begin_forward(step, steps)
        for number in range(layers):
            precision, fallback = outcome(number, step)
            backend = HOST if precision == "fp16" else "reference emulation"
            ledger.record(f"double.{number}", precision, backend, "", fallback)
    return ledger.end_run()


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (1, 50), (57, 1), (57, 20), (114, 100)])
def test_a_picture_of_any_size_is_an_image_in_range(layers, steps):
    image = heat_strip(run_of(layers, steps, lambda layer, step: ("int8", False)))
    assert image.dtype == torch.float32
    assert image.shape[0] == 1
    assert image.shape[3] == 3
    assert image.min() >= 0
    assert image.max() <= 1
    # Cells large enough to see, whatever their number.
    assert where(image, COLOURS["int8"]).sum() >= layers * steps * 100


def test_layers_go_down_and_steps_go_right():
    def outcome(layer, step):
        if layer == 0 and step == 9:
            return "fp4", False
        return ("int8", False) if layer else ("fp16", False)

    image = heat_strip(run_of(10, 10, outcome))
    cells = {name: where(image, COLOURS[name])[HEADER:] for name in ("fp16", "int8", "fp4")}
    rows = {name: mask.any(1).nonzero() for name, mask in cells.items()}
    columns = {name: mask.any(0).nonzero() for name, mask in cells.items()}
    assert rows["fp16"].max() < rows["int8"].min()
    assert rows["fp4"].max() < rows["int8"].min()
    assert columns["fp4"].min() > columns["fp16"].max()


def test_wanted_but_missed_cells_look_other_than_chosen_ones():
    image = heat_strip(run_of(4, 4, lambda layer, step: ("fp16", layer % 2 == 1)))
    assert where(image, COLOURS["fp16"]).any()
    assert where(image, COLOURS["fp16, although less was wanted"]).any()


def test_a_run_without_calls_gives_a_picture_that_says_so():
    image = heat_strip(Run("nothing"))
    assert image.shape[1] > 100
    assert not any(where(image, colour).any() for colour in COLOURS.values())


def test_an_interrupted_run_says_so_above_the_cells_and_nowhere_else():
    run = run_of(2, 2, lambda layer, step: ("int8", False))
    whole = heat_strip(run)
    run.interrupted = True
    broken_off = heat_strip(run)
    changed = (whole != broken_off).any(-1)[0].any(1).nonzero()
    assert 0 < changed.max() < HEADER


def test_drawing_leaves_the_global_state_of_matplotlib_alone():
    import matplotlib
    from matplotlib import _pylab_helpers

    before = dict(matplotlib.rcParams)
    heat_strip(run_of(2, 2, lambda layer, step: ("int8", False)))
    assert dict(matplotlib.rcParams) == before
    assert not _pylab_helpers.Gcf.figs
