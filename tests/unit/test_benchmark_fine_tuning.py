"""The fine-tuning benchmark at a size that the CPU takes."""

import pytest
import torch
from sageattention3.benchmarks import fine_tuning
from sageattention3.benchmarks.fine_tuning import SMALL, batches, run_one, show, windows
from sageattention3.benchmarks.language_model import Config, LanguageModel

TINY = Config(layers=2, channels=96, hidden=64, heads=3, kv_heads=1, vocabulary=40)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(fine_tuning, "WINDOW", 32)
    monkeypatch.setattr(fine_tuning, "WARM_UP", 2)
    monkeypatch.setattr(fine_tuning, "STEPS", {"fine-tuning": 30})
    monkeypatch.setattr(fine_tuning, "RATES", {"fine-tuning": 3e-3})


@pytest.fixture
def tokens():
    """Forty words in a fixed order: what follows each can be learned."""
    line = torch.arange(40, dtype=torch.int32).repeat(20)
    return {"train": line, "held_out": line[:200]}


def trained(tokens, name, seed=0):
    torch.manual_seed(5)
    return run_one(LanguageModel(TINY), tokens, name, "fine-tuning", seed)


def test_windows_share_the_token_between_them(tokens):
    found = windows(tokens["train"])
    assert found.shape == (24, 33)
    assert found[0, -1] == found[1, 0]
    with pytest.raises(ValueError, match="fewer than a window of 33"):
        windows(torch.zeros(32, dtype=torch.int32))


def test_every_window_comes_once_before_any_comes_again(tokens):
    tokens = torch.arange(800, dtype=torch.int32)
    source = batches(tokens, seed=1)
    seen = torch.cat([next(source) for _ in range(6)])[:, 0]
    assert sorted(seen.tolist()) == [32 * i for i in range(24)]
    again = batches(tokens, seed=1)
    assert torch.equal(torch.cat([next(again) for _ in range(6)])[:, 0], seen)


def test_both_attentions_learn_the_same(tokens, capsys):
    plain, sagebwd = (trained(tokens, name) for name in ("torch", "sagebwd"))
    assert plain["curve"][-1] < plain["curve"][0] - 0.5
    assert sagebwd["curve"] != plain["curve"]
    assert sagebwd["curve"] == pytest.approx(plain["curve"], rel=0.02)
    read = plain["held_out_loss"]
    assert list(read) == ["torch", "int8", "fp4"]
    assert 0 < abs(read["int8"] - read["torch"]) < abs(read["fp4"] - read["torch"]) + 0.02
    from rich.console import Console

    show([plain, sagebwd], Console(width=120))
    assert "sagebwd" in capsys.readouterr().out


def test_the_model_to_pretrain_has_a_head_size_that_kernels_take():
    assert SMALL.head_dim == 64
