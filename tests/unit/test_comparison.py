"""Figures of a comparison: against their formulas, and in cases whose answer is known."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sageattention3.nodes.engine.comparison import (
    Comparison,
    ComparisonError,
    Motion,
    compare_motion,
    compare_sequences,
    describe_comparison,
    pair_up,
)
from sageattention3.nodes.engine.comparison_chart import comparison_chart


def images(count=1, height=32, width=48, channels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, height, width, channels, generator=generator) * 0.8 + 0.1


def latent(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"samples": torch.randn(*shape, generator=generator)}


def compared(reference, result):
    pair = pair_up(reference, result)
    return compare_sequences(pair), pair


# --- figures -------------------------------------------------------------------------------------


def test_a_constant_error_has_the_psnr_of_the_formula():
    reference = images(3)
    comparison, _ = compared(reference, reference + 0.05)
    assert comparison.psnr == pytest.approx([-20 * math.log10(0.05)] * 3, abs=1e-3)
    assert comparison.overall_psnr == pytest.approx(-20 * math.log10(0.05), abs=1e-3)


def test_the_overall_psnr_is_that_of_all_pixels_together_and_not_a_mean_of_decibels():
    reference, result = images(2), images(2)
    result[0] += 0.1
    comparison, _ = compared(reference, result)
    assert comparison.psnr[1] == math.inf
    assert comparison.overall_psnr == pytest.approx(-10 * math.log10(0.01 / 2), abs=1e-3)
    assert comparison.worst == 0


def test_ssim_is_one_for_equal_pictures_black_ones_too_and_falls_with_blur_more_than_with_light():
    reference = images(1, 64, 64)
    blurred = torch.nn.functional.avg_pool2d(reference.movedim(-1, 1), 5, 1, 2).movedim(1, -1)
    lighter = reference + (blurred - reference).square().mean().sqrt()
    scores = [compared(reference, other)[0].overall_ssim for other in (reference, lighter, blurred)]
    assert scores[0] == pytest.approx(1, abs=1e-5)
    assert scores[2] < scores[1] - 0.2, "equal PSNR, but the structure is gone"
    assert compared(torch.zeros(1, 16, 16, 3), torch.zeros(1, 16, 16, 3))[0].ssim == [1.0]


def test_frames_smaller_than_the_window_have_a_psnr_and_no_ssim():
    comparison, pair = compared(images(1, 5, 40), images(1, 5, 40, seed=1))
    assert comparison.ssim == []
    assert "SSIM" not in describe_comparison(comparison, pair.kind)


def test_latents_are_measured_on_the_range_of_the_reference_whatever_its_units():
    reference = latent(1, 16, 24, 24)["samples"]
    result = reference + latent(1, 16, 24, 24, seed=1)["samples"] * 0.1
    plain, pair = compared({"samples": reference}, {"samples": result})
    scaled, _ = compared({"samples": reference * 7 + 3}, {"samples": result * 7 + 3})
    span = (reference.max() - reference.min()).item()
    wanted = -20 * math.log10((result - reference).square().mean().sqrt().item() / span)
    assert plain.overall_psnr == pytest.approx(wanted, abs=1e-3)
    assert scaled.overall_psnr == pytest.approx(wanted, abs=1e-2)
    assert "range of the reference" in describe_comparison(plain, pair.kind)


def test_frames_of_a_video_latent_belong_to_their_own_sequence():
    """The change from the last frame of one video to the first of the next is no motion."""
    still = torch.arange(2.0)[:, None, None, None, None].expand(2, 4, 3, 8, 8)
    comparison, pair = compared({"samples": still}, {"samples": still})
    assert pair.reference.shape == (2, 3, 4, 8, 8)
    assert comparison.motion == Motion(1.0, 0.0)


def test_noise_of_its_own_in_every_frame_is_flicker_and_the_same_noise_in_all_is_not():
    reference = images(1).expand(8, -1, -1, -1) + torch.linspace(0, 0.1, 8)[:, None, None, None]
    own = reference + 0.05 * (images(8, seed=1) - 0.5)
    same = reference + 0.05 * (images(1, seed=1) - 0.5)
    flickering, still = (compared(reference, result)[0].motion for result in (own, same))
    assert flickering.energy > 2
    assert flickering.error > 0.5
    assert still.energy == pytest.approx(1, abs=1e-3)
    assert still.error < 1e-3


@given(st.integers(2, 5), st.floats(0.0, 3.0))
@settings(max_examples=20, deadline=None)
def test_motion_scales_as_its_words_say(frames, factor):
    reference = torch.randn(1, frames, 3, 4, 4, generator=torch.Generator().manual_seed(frames))
    motion = compare_motion(reference, reference * factor)
    assert motion.energy == pytest.approx(factor**2, rel=1e-4, abs=1e-6)
    assert motion.error == pytest.approx(abs(factor - 1), rel=1e-4, abs=1e-6)


def test_a_still_reference_gives_no_division_by_zero():
    still = torch.zeros(1, 3, 1, 8, 8)
    assert compare_motion(still, still) == Motion(1.0, 0.0)
    moving = still + torch.arange(3.0)[:, None, None, None]
    motion = compare_motion(still, moving)
    assert motion == Motion(math.inf, math.inf)
    text = describe_comparison(Comparison([20.0] * 3, [], motion), "picture")
    assert "the reference stands still, the result does not" in text


# --- what can't be compared ----------------------------------------------------------------------

NAN = images(4)
NAN[2, 0, 0, 0] = math.nan


@pytest.mark.parametrize(
    ("reference", "result", "words"),
    [
        (images(2), images(3), "2 of 48 x 32 with 3 channels, result is 3 of"),
        (images(), images(height=40), "result is 1 of 48 x 40"),
        (images(), images(channels=4), "with 4 channels"),
        (images(), latent(1, 4, 8, 8), "reference is IMAGE and result is LATENT"),
        (latent(1, 4, 8, 8), latent(1, 4, 2, 8, 8), "4 channels"),
        (images(4), NAN, "result holds NaN or infinity in 1 of 4 frames, the first is number 3"),
        (NAN, images(4), "reference holds NaN"),
        (images() / 0, images(), "reference holds NaN or infinity"),
        (5, images(), "reference is neither an IMAGE nor a LATENT"),
        ({"samples": [1, 2]}, latent(1, 4, 8, 8), "reference is neither"),
        (torch.zeros(3), images(), "no batch of images"),
        (images()[:0], images(), "no batch of images"),
        (latent(1, 8, 100), latent(1, 8, 100), "no pictures"),
        ({"samples": torch.zeros(1, 4, 8, 8)}, latent(1, 4, 8, 8), "not an empty latent"),
    ],
)
def test_what_can_not_be_compared_is_refused_with_the_reason(reference, result, words):
    with pytest.raises(ComparisonError) as caught:
        pair_up(reference, result)
    assert words in str(caught.value)


def test_inputs_stay_as_they_are_and_count_as_they_would_be_saved():
    reference, result = images() * 2 - 0.5, (images(seed=1) * 3).half()
    before = reference.clone(), result.clone()
    comparison, _ = compared(reference, result)
    assert torch.equal(reference, before[0])
    assert torch.equal(result, before[1])
    clamped, _ = compared(reference.clamp(0, 1), result.clamp(0, 1))
    assert comparison == clamped


# --- words and pictures --------------------------------------------------------------------------


def test_equal_pictures_are_called_identical():
    comparison, pair = compared(images(2), images(2))
    assert (
        describe_comparison(comparison, pair.kind) == "Identical: no value of 2 pictures differs."
    )


def test_the_words_hold_the_figures_of_the_whole_and_of_the_worst():
    text = describe_comparison(Comparison([30.0, 20.0], [0.9, 0.7], Motion(1.25, 0.3)), "picture")
    assert "PSNR 22.6 dB, SSIM 0.8000 over 2 pictures." in text
    assert "Worst: number 2, PSNR 20.0 dB, SSIM 0.7000." in text
    assert "1.250 times the reference's energy" in text
    assert "relative error of these changes 0.300" in text


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("size", [(32, 48), (8, 200), (700, 90)])
def test_the_chart_is_a_picture_with_heat_where_the_difference_is(count, size):
    reference = images(count, *size) * 0 + 0.5  # grey: all colour is heat, or the curve
    result = reference.clone()
    result[-1, : size[0] // 2] += 0.3
    comparison, pair = compared(reference, result)
    chart = comparison_chart(pair, comparison)
    assert chart.dtype == torch.float32
    assert chart.shape[0] == 1
    assert chart.shape[3] == 3
    third = chart.shape[2] // 3
    coloured = (chart[0].amax(-1) - chart[0].amin(-1)) > 0.02
    heat_rows = coloured[:, 2 * third + third // 8 : -third // 3].sum(1)
    assert heat_rows.max() > third // 4
    assert (count > 1) == (chart.shape[1] > comparison_chart(*_single(pair, comparison)).shape[1])


def _single(pair, comparison):
    worst = comparison.worst
    one = pair._replace(reference=pair.reference[:, [worst]], result=pair.result[:, [worst]])
    return one, compare_sequences(one)


@pytest.mark.parametrize("channels", [1, 4, 16])
def test_latents_of_any_depth_have_a_chart(channels):
    comparison, pair = compared(
        latent(1, channels, 3, 12, 20), latent(1, channels, 3, 12, 20, seed=1)
    )
    assert comparison_chart(pair, comparison).shape[-1] == 3
