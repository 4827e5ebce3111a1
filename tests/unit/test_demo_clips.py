"""The drawn clips show what their words say, and a seed says all of a clip."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sageattention3.demo.clips import COLOURS, Scenes, draw, random_scenes
from sageattention3.demo.codec import fit
from sageattention3.demo.shapes import DIGITS, distance_maps
from sageattention3.demo.words import (
    CATEGORIES,
    NOTHING,
    POOLED,
    load,
    parse,
    spell,
    vocabulary,
)

TIMES = torch.tensor([[0.0, 0.5, 1.0]])


def scene(prompt):
    return Scenes(
        words=parse(prompt)[None],
        centre=torch.full((1, 2), 0.5),
        radius=torch.tensor([0.2]),
        tilt=torch.zeros(1),
        phase=torch.zeros(1, 2),
        turn=torch.ones(1),
    )


def covered(clip, colour):
    """[T, H, W]: where pixels have the colour of the shape."""
    wanted = torch.tensor(COLOURS[colour])[:, None, None, None]
    return (clip[0] - wanted).abs().amax(0) < 0.05


def centres(mask):
    """[T, 2]: mean x and y of each frame's pixels, in widths."""
    return torch.stack(
        [frame.nonzero().float().flip(1).mean(0) / frame.shape[-1] for frame in mask]
    )


@given(st.tuples(*(st.sampled_from(words) for words in CATEGORIES.values())))
def test_a_prompt_is_read_as_it_is_spelt(words):
    colour, shape, motion, ground, texture = words
    prompt = f"{colour} {shape} {motion} over {ground} {texture}"
    assert spell(parse(prompt)) == prompt
    assert parse(f"A {colour} {shape}, moving {motion} over the {ground} {texture}").equal(
        parse(prompt)
    )


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("red star", "2 of the 5 words"),
        ("red horse left over blue plain", "'horse' is no shape"),
        ("star red left over blue plain", "'star' is no colour"),
    ],
)
def test_a_prompt_of_other_words_is_told_what_is_known(prompt, told):
    with pytest.raises(ValueError, match=told):
        parse(prompt)


def test_words_differ_from_one_another_and_from_nothing_said():
    words = vocabulary()
    rows = torch.stack(
        [parse("red star left over blue dots"), parse("blue star left over red dots"), parse("")]
    )
    assert rows[2].tolist() == [NOTHING] * len(CATEGORIES)
    context, pooled = words.embed(rows)
    assert pooled.shape == (3, POOLED)
    for numbers in (context.flatten(1), pooled):
        assert torch.cdist(numbers, numbers).fill_diagonal_(9).min() > 1


def test_the_shipped_model_was_trained_with_these_words():
    assert all(x.equal(y) for x, y in zip(load(), vocabulary(), strict=True))


@pytest.mark.parametrize(
    ("motion", "way"),
    [("still", (0, 0)), ("left", (-1, 0)), ("right", (1, 0)), ("up", (0, -1)), ("down", (0, 1))],
)
def test_a_shape_moves_as_its_word_says(motion, way):
    clip = draw(scene(f"red circle {motion} over blue checks"), TIMES)
    found = centres(covered(clip, "red"))
    assert (found[2] - found[0]).tolist() == pytest.approx([0.42 * x for x in way], abs=0.01)
    assert found[1].tolist() == pytest.approx([0.5, 0.5], abs=0.01)


def test_spinning_growing_and_circling_shapes_do_so():
    spinning = covered(draw(scene("red one spinning over blue plain"), TIMES), "red")
    wide = [frame.any(0).sum() for frame in spinning]
    assert wide[1] > 2 * wide[0]
    growing = covered(draw(scene("red star growing over blue plain"), TIMES), "red").sum((1, 2))
    assert growing[2] > 4 * growing[0]
    found = centres(covered(draw(scene("red star circling over blue plain"), TIMES), "red"))
    assert (found[0] - found[1]).norm() == pytest.approx(0.4, abs=0.02)
    assert (found[0] - found[2]).norm() < 0.01


def test_every_shape_and_every_ground_is_another():
    maps = distance_maps(CATEGORIES["shape"], 64) < 0
    for i, one in enumerate(maps):
        assert one.any()
        assert all((one ^ other).sum() > 20 for other in maps[:i])
    assert set(DIGITS) < set(CATEGORIES["shape"])
    grounds = [
        draw(scene(f"red circle still over blue {texture}"), TIMES)[0, :, 0]
        for texture in CATEGORIES["texture"]
    ]
    for i, one in enumerate(grounds):
        assert all((one - other).abs().mean() > 0.01 for other in grounds[:i])


def test_a_seed_draws_the_same_clips_and_no_shape_on_its_own_colour():
    one, same, other = (random_scenes(64, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert all(x.equal(y) for x, y in zip(one, same, strict=True))
    assert not one.words.equal(other.words)
    for row in one.words:
        said = spell(row).split()
        assert said[0] != said[4]


def test_the_codec_loses_little_of_a_clip_and_nothing_of_a_latent():
    codec = fit(64)
    generator = torch.Generator().manual_seed(3)
    clips = draw(random_scenes(8, generator), torch.linspace(0, 1, 3).expand(8, 3))
    latents = codec.encode(clips)
    assert latents.shape == (8, 16, 3, 32, 32)
    psnr = -10 * (codec.decode(latents) - clips).square().mean().log10()
    assert psnr > 34
    grey = codec.encode(torch.full((1, 3, 2, 8, 8), 0.5))
    grey += 0.01 * torch.randn(grey.shape, generator=generator)
    torch.testing.assert_close(codec.encode(codec.decode(grey)), grey, rtol=1e-4, atol=1e-4)


def test_latents_have_the_size_that_the_host_expects():
    codec = fit(64)
    clips = draw(random_scenes(32, torch.Generator().manual_seed(4)), torch.zeros(32, 1))
    assert 0.8 < codec.encode(clips).std() * 0.476986 < 1.2
