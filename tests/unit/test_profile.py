"""Profiles: what a file keeps, which layers it excepts, and which models and files it refuses."""

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sageattention3.nodes.engine.profile import (
    Profile,
    ProfileError,
    fingerprint,
    require_profile,
)

ERRORS = {"fp4": {"double.0": 0.25, "double.1": 0.0625}, "int8": {"double.0": 0.0078125}}


def patcher(seed=0, width=16):
    """As much of a ModelPatcher as a fingerprint reads."""
    torch.manual_seed(seed)
    network = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 8)
    )
    return SimpleNamespace(model=SimpleNamespace(diffusion_model=network), backup={})


def make(model=None, errors=ERRORS, max_error=0.1):
    return Profile("flux", fingerprint(model or patcher()), errors, max_error, "0.1.0")


def test_saving_and_loading_keeps_everything(tmp_path):
    made = make()
    made.save(tmp_path / "p.safetensors")
    loaded = Profile.load(tmp_path / "p.safetensors")
    assert loaded.errors == made.errors
    assert (loaded.family, loaded.max_error, loaded.pack_version) == ("flux", 0.1, "0.1.0")
    loaded.check(patcher())


def test_exceptions_are_the_layers_above_the_maximum_in_that_precision():
    profile = make(errors={"fp4": {"a": 0.2, "b": 0.1, "c": 0.05, "d": math.inf}})
    assert profile.exceptions("fp4") == {"a", "d"}
    assert profile.exceptions("int8") == set()
    assert profile.layers == {"a", "b", "c", "d"}


def test_a_profile_of_the_same_model_in_fp8_weights_still_fits():
    profile = make()
    other = patcher()
    for parameter in other.model.diffusion_model.parameters():
        parameter.data = parameter.data.to(torch.float8_e4m3fn)
    profile.check(other)


def test_a_merged_lora_does_not_make_it_another_model():
    profile = make()
    other = patcher()
    linear = other.model.diffusion_model[0]
    original = linear.weight.data.clone()
    linear.weight.data.normal_()
    with pytest.raises(ProfileError):
        profile.check(other)
    other.backup = {"diffusion_model.0.weight": SimpleNamespace(weight=original)}
    profile.check(other)


def _with_another_buffer():
    other = patcher()  # the very same weights
    other.model.diffusion_model.register_buffer("guidance_in", torch.zeros(3))
    return other


@pytest.mark.parametrize("other", [patcher(seed=1), patcher(width=24), _with_another_buffer()])
def test_another_model_is_refused_by_weights_or_by_shapes(other):
    with pytest.raises(ProfileError, match="measured on another model"):
        make().check(other)


def _rewrite(path, change):
    tensors = load_file(path)
    head = {
        "format": 1,
        "family": "flux",
        "shapes": "00",
        "layers": ["double.0", "double.1"],
        "max_error": 0.1,
        "pack_version": "0.1.0",
    }
    change(tensors, head)
    save_file(tensors, path, metadata={"sageattention3_profile": json.dumps(head)})


def _negative(tensors, head):
    tensors["errors.fp4"][1] = -0.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors, head: None, None),
        (lambda tensors, head: head.update(format=2), "another version"),
        (lambda tensors, head: head.update(format=True), "damaged .*format"),
        (lambda tensors, head: head.pop("format"), "damaged .*format"),
        (lambda tensors, head: head["layers"].pop(), "damaged"),
        (lambda tensors, head: head.update(layers=["double.0"] * 2), "damaged .*twice"),
        (lambda tensors, head: head.update(layers=["double.0", 1]), "damaged .*names"),
        (lambda tensors, head: head.update(layers=["double.0", None]), "damaged .*names"),
        (lambda tensors, head: head.update(layers="ab"), "damaged .*names"),
        (lambda tensors, head: head.pop("family"), "damaged .*family"),
        (lambda tensors, head: head.update(family=5), "damaged .*family"),
        (lambda tensors, head: head.update(shapes=None), "damaged .*shapes"),
        (lambda tensors, head: head.update(max_error="much"), "damaged .*max_error"),
        (lambda tensors, head: head.update(max_error=math.nan), "damaged .*max_error"),
        (lambda tensors, head: head.update(max_error=-1), "damaged .*max_error"),
        (lambda tensors, head: head.update(max_error=True), "damaged .*max_error"),
        (_negative, "damaged .*negative"),
        (lambda tensors, head: tensors.pop("fingerprint"), "damaged .*fingerprint"),
        (lambda tensors, head: tensors["fingerprint"].fill_(math.nan), "damaged .*fingerprint"),
        (lambda tensors, head: tensors.update({"errors.fp4": torch.zeros(2, 2)}), "damaged"),
        (lambda tensors, head: tensors.update({"errors.fp4": torch.zeros(2).int()}), "damaged"),
        (lambda tensors, head: tensors.update({"errors.int2": torch.zeros(2)}), "damaged"),
        (lambda tensors, head: tensors.update({"weight": torch.zeros(2)}), "damaged .*weight"),
    ],
)
def test_a_damaged_profile_is_refused_with_what_is_wrong_and_what_to_do(tmp_path, change, says):
    path = tmp_path / "p.safetensors"
    make().save(path)
    _rewrite(path, change)
    if says is None:
        assert Profile.load(path).errors == ERRORS
        return
    with pytest.raises(ProfileError, match=says) as error:
        Profile.load(path)
    assert "use another copy, or none" in str(error.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "7", "{", "9" * 10_000])
def test_a_header_that_is_no_table_is_refused(tmp_path, text):
    path = tmp_path / "p.safetensors"
    save_file({"fingerprint": torch.zeros(2)}, path, metadata={"sageattention3_profile": text})
    with pytest.raises(ProfileError, match="damaged"):
        Profile.load(path)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="there is no file"):
        Profile.load(tmp_path / "absent.safetensors")
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path):
        with pytest.raises(ProfileError, match="can't be read"):
            Profile.load(path)
    save_file({"weight": torch.zeros(2)}, tmp_path / "lora.safetensors")
    with pytest.raises(ProfileError, match="not a profile"):
        Profile.load(tmp_path / "lora.safetensors")


@pytest.mark.parametrize("path", [None, 5, b"p", ["p"]])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(ProfileError, match="not the path of a profile"):
        Profile.load(path)


@pytest.mark.parametrize("value", ["x", 5, {}, [], "x" * 10_000, ERRORS])
def test_a_value_that_is_no_profile_is_named_with_what_to_do(value):
    with pytest.raises(ProfileError, match="Leave the profile input unconnected") as error:
        require_profile(value)
    assert type(value).__name__ in str(error.value)
    assert len(str(error.value)) < 300


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_corrupt_file_raises_nothing_but_a_profile_error(tmp_path, data):
    path = tmp_path / "p.safetensors"
    make().save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(ProfileError):
        Profile.load(path)
