"""Profiles: what a file keeps, and which models and files are refused."""

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sageattention3.nodes.engine import profile_file
from sageattention3.nodes.engine.fingerprint import fingerprint
from sageattention3.nodes.engine.profile import (
    Origin,
    ProfileError,
    make_profile,
    require_profile,
)
from sageattention3.nodes.engine.record import Record

from .profiles import NAN, profile_of

ERRORS = {
    "fp4": {"double.0": [0.25, NAN], "double.1": [0.0625, 0.5]},
    "int8": {"double.0": [0.0078125, 0.0]},
}
SIGMAS = (1.0, 0.5, 0.0)


def patcher(seed=0, width=16):
    """As much of a ModelPatcher as a fingerprint reads."""
    torch.manual_seed(seed)
    network = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 8)
    )
    return SimpleNamespace(model=SimpleNamespace(diffusion_model=network), backup={})


def make(model=None):
    seconds = {"fp16": {"double.0": 2.0, "double.1": 1.0}, "fp4": {"double.1": 0.5}}
    return profile_of(
        ERRORS, seconds=seconds, sigmas=SIGMAS, fingerprint=fingerprint(model or patcher())
    )


def parts(profile):
    """Everything in a profile, in a form that can be compared."""
    tensors = {
        **{f"{p}.{m}": t for p, found in profile.errors.items() for m, t in found.items()},
        **{f"seconds.{p}": row for p, row in profile.seconds.items()},
        **profile.predictors,
        **{
            name: getattr(profile, name)
            for name in ("sigmas", "progress", "moved", "calls", "tokens")
        },
        "fingerprint": profile.origin.fingerprint.samples,
    }
    origin = profile.origin
    return (
        {name: tensor.nan_to_num(-1.0).tolist() for name, tensor in tensors.items()},
        (origin.family, origin.fingerprint.shapes, origin.shape, origin.gpu, origin.pack_version),
        (profile.layers, profile.steps_done, profile.size),
    )


def test_saving_and_loading_keeps_everything(tmp_path):
    path = tmp_path / "new folder" / "p.safetensors"
    made = make()
    profile_file.save(made, path)
    loaded = profile_file.load(path)
    assert parts(loaded) == parts(made)
    assert [file.name for file in path.parent.iterdir()] == ["p.safetensors"]
    loaded.check(patcher())


def test_a_run_in_which_nothing_could_be_measured_says_why():
    record = Record()
    origin = Origin("flux", fingerprint(patcher()), (4, 8, 8), "CPU", "0")
    with pytest.raises(ProfileError, match="no attention call of this model was seen"):
        make_profile(record, origin)
    record.groups["double.0"] = ("double", "joint")
    with pytest.raises(ProfileError, match="calibrate with more steps"):
        make_profile(record, origin)
    record.refusals["fp4"]["double.0"] = "no native kernel"
    with pytest.raises(ProfileError, match=r"no native kernel.* switch emulation on"):
        make_profile(record, origin)


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
    with profile_file.safe_open(path, "pt") as file:
        head = json.loads(file.metadata()["sageattention3_profile"])
    tensors = load_file(path)
    change(tensors, head)
    save_file(tensors, path, metadata={"sageattention3_profile": json.dumps(head)})


def _set(name, value):
    def change(tensors, head):
        tensors[name] = torch.full_like(tensors[name], value)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors, head: None, None),
        (lambda tensors, head: head.update(format=1), "another version"),
        (lambda tensors, head: head.update(format=True), "damaged .*format"),
        (lambda tensors, head: head.pop("format"), "damaged .*format"),
        (lambda tensors, head: head["layers"].pop(), "damaged .*shape"),
        (lambda tensors, head: head.update(layers=[]), "damaged .*names"),
        (lambda tensors, head: head.update(layers=["double.0"] * 2), "damaged .*twice"),
        (lambda tensors, head: head.update(layers=["double.0", 1]), "damaged .*names"),
        (lambda tensors, head: head.update(layers="ab"), "damaged .*names"),
        (lambda tensors, head: head.pop("family"), "damaged .*family"),
        (lambda tensors, head: head.update(gpu=5), "damaged .*gpu"),
        (lambda tensors, head: head.update(shapes=None), "damaged .*shapes"),
        (lambda tensors, head: head.update(latent=[16, "8"]), "damaged .*latent"),
        (lambda tensors, head: head.update(size=0), "damaged .*size"),
        (lambda tensors, head: head.update(size=math.nan), "damaged .*size"),
        (lambda tensors, head: head.update(size=True), "damaged .*size"),
        (lambda tensors, head: head.update(steps_done=3), "damaged .*steps_done"),
        (lambda tensors, head: tensors.pop("sigmas"), "damaged .*sigmas"),
        (lambda tensors, head: tensors.pop("moved"), "damaged .*moved"),
        (lambda tensors, head: tensors.pop("cosine.fp4"), "damaged .*cosine"),
        (_set("rel_l1.fp4", -0.5), "damaged .*negative"),
        (_set("seconds.fp16", 0.0), "damaged .*seconds"),
        (_set("calls", math.nan), "damaged .*calls"),
        (_set("fingerprint", math.nan), "damaged .*fingerprint"),
        (lambda tensors, head: tensors.pop("fingerprint"), "damaged .*fingerprint"),
        (lambda tensors, head: tensors.update({"rel_l1.fp4": torch.zeros(2, 3)}), "damaged"),
        (lambda tensors, head: tensors.update({"moved": torch.zeros(2, 2).int()}), "damaged"),
        (lambda tensors, head: tensors.update({"rel_l1.int2": torch.zeros(2, 2)}), "damaged"),
        (lambda tensors, head: tensors.update({"weight": torch.zeros(2)}), "damaged .*weight"),
    ],
)
def test_a_damaged_profile_is_refused_with_what_is_wrong_and_what_to_do(tmp_path, change, says):
    path = tmp_path / "p.safetensors"
    profile_file.save(make(), path)
    _rewrite(path, change)
    if says is None:
        assert parts(profile_file.load(path)) == parts(make())
        return
    with pytest.raises(ProfileError, match=says) as error:
        profile_file.load(path)
    assert "calibrate again, or use another copy" in str(error.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "7", "{", "9" * 10_000])
def test_a_header_that_is_no_table_is_refused(tmp_path, text):
    path = tmp_path / "p.safetensors"
    save_file({"fingerprint": torch.zeros(2)}, path, metadata={"sageattention3_profile": text})
    with pytest.raises(ProfileError, match="damaged"):
        profile_file.load(path)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="there is no file"):
        profile_file.load(tmp_path / "absent.safetensors")
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path):
        with pytest.raises(ProfileError, match="can't be read"):
            profile_file.load(path)
    save_file({"weight": torch.zeros(2)}, tmp_path / "lora.safetensors")
    with pytest.raises(ProfileError, match="not a profile"):
        profile_file.load(tmp_path / "lora.safetensors")


@pytest.mark.parametrize("value", ["x", 5, {}, [], "x" * 10_000, ERRORS])
def test_a_value_that_is_no_profile_is_named_with_what_to_do(value):
    with pytest.raises(ProfileError, match="leave the input unconnected") as error:
        require_profile(value)
    assert type(value).__name__ in str(error.value)
    assert len(str(error.value)) < 400


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_corrupt_file_raises_nothing_but_a_profile_error(tmp_path, data):
    path = tmp_path / "p.safetensors"
    profile_file.save(make(), path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(ProfileError):
        profile_file.load(path)
