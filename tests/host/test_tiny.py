"""The tiny models: the same numbers in every process and on every machine."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sageattention3.demo import tiny
from sageattention3.demo.families import FAMILIES

from .more_families import MORE

pytestmark = pytest.mark.host


@pytest.fixture
def unset_memory_is_nan():
    """Makes torch.empty give NaN, so that a weight which nobody sets differs from itself."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("unset_memory_is_nan")
@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_two_tiny_models_of_a_family_are_equal_to_the_bit(name):
    family = {**FAMILIES, **MORE}[name]
    first, second = (tiny.build(family, 0).diffusion_model.state_dict() for _ in range(2))
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


@pytest.mark.usefixtures("unset_memory_is_nan")
@pytest.mark.parametrize("name", ["sd3", "ltxv"])
def test_two_files_of_a_family_are_equal_and_an_outdated_one_is_made_anew(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr(tiny, "MODELS", tmp_path)
    path = tiny.checkpoint(name)
    first = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({"weight": torch.zeros(1)}, path, metadata={**metadata, "recipe": "1"})

    second = load_file(tiny.checkpoint(name))
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    made = path.stat().st_mtime_ns
    assert tiny.checkpoint(name).stat().st_mtime_ns == made
