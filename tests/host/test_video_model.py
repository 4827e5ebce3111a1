"""The demo's video model: it learns, and the host runs what training made as training meant it."""

import json
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from sageattention3.demo import train
from sageattention3.demo.codec import LATENT_SCALE
from sageattention3.demo.video_model import build, euler
from sageattention3.demo.words import parse, vocabulary

pytestmark = pytest.mark.host
TINY = ["--device", "cpu", "--batch", "1", "--size", "16", "--rate", "3e-3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert train.main(["--out", str(folder), *TINY, "--steps", "200"]) == 0
    return folder


def test_the_loss_falls(trained):
    curve = json.loads((trained / "training.json").read_text())["curve"]
    first, last = curve[0], curve[-1]
    assert last["clips"] < 0.9 * first["clips"]
    assert last["images"] < 0.9 * first["images"]


def test_a_seed_trains_the_same_model(trained, tmp_path):
    for name in ("one", "same"):
        train.main(["--out", str(tmp_path / name), *TINY, "--steps", "3"])
    one, same = (load_file(tmp_path / name / train.CHECKPOINT) for name in ("one", "same"))
    assert all(one[key].equal(same[key]) for key in one)


def test_training_that_is_cut_off_leaves_a_model(tmp_path):
    train.main(["--out", str(tmp_path), *TINY, "--seconds", "0.5"])
    weights = load_file(tmp_path / train.CHECKPOINT)
    assert all(torch.isfinite(x).all() for x in weights.values())


@pytest.mark.parametrize(("tick", "least", "most"), [(0.05, 6, 30), (0.25, 3, 3), (1.0, 1, 1)])
def test_training_takes_the_steps_that_there_is_time_for(tmp_path, monkeypatch, tick, least, most):
    """By a clock that goes on whenever it is read: two to four times in a step."""
    readings = count(0, tick)
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: next(readings)))
    monkeypatch.setattr(train, "TIMED", (1, 3))
    train.main(["--out", str(tmp_path), *TINY, "--seconds", "2"])
    record = json.loads((tmp_path / "training.json").read_text())
    assert least <= record["steps"] <= most


@torch.inference_mode()
def test_the_hosts_sampler_makes_of_the_file_what_training_makes(trained):
    """Scale of the latent, noise levels, timesteps, conditioning and direction, all at once."""
    import comfy.sample
    import comfy.sd

    path = str(trained / train.CHECKPOINT)
    loaded = comfy.sd.load_diffusion_model(path)
    assert type(loaded.model).__name__ == "HunyuanVideo"
    model = build(torch.device("cpu"), seed=0)
    model.load_state_dict({key: x.float() for key, x in load_file(path).items()})
    context, pooled = vocabulary().embed(parse("red star left over blue dots")[None])
    noise = torch.randn(1, 16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    conditioning = [[context, {"pooled_output": pooled}]]
    made = comfy.sample.sample(
        loaded,
        noise,
        1,
        1.0,
        "euler",
        "simple",
        conditioning,
        conditioning,
        torch.zeros_like(noise),
        disable_pbar=True,
        sigmas=torch.tensor([1.0, 0.75, 0.0]),
    )
    mine = euler(model, noise, context, pooled, steps=2, shift=3.0)
    torch.testing.assert_close(made * LATENT_SCALE, mine, rtol=1e-3, atol=1e-3)
