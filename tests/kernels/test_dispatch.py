"""Decisions: which backend, or the reason why none, from shapes and flags alone."""

from dataclasses import replace

import pytest
import torch
from sageattention3 import kernels
from sageattention3.kernels import backends, dispatch, selftest
from sageattention3.kernels.backend import (
    Backend,
    HeadDimIn,
    HeadDimUpTo,
    NotCausal,
    OnDevice,
    TokensFrom,
)
from sageattention3.kernels.request import everyday_request

EVERYDAY = everyday_request("int8", torch.device("cpu"))


def never(*args, **kwargs):
    raise AssertionError("dispatch must decide without running anything")


def fake(
    name: str,
    *,
    native: bool = True,
    precisions=("int8",),
    constraints=(),
    train=None,
    unasked=(),
):
    return Backend(
        name, tuple(precisions), native, tuple(constraints), never, train, unasked=unasked
    )


@pytest.fixture
def registry(monkeypatch):
    """Replaces the backends; natives count as proven but for those named in ``faults``."""

    def use(*entries, faults=None):
        monkeypatch.setattr(backends, "BACKENDS", entries)
        monkeypatch.setattr(selftest, "fault", lambda name, *_: (faults or {}).get(name))

    return use


def test_the_first_backend_whose_constraints_hold_is_chosen(registry):
    registry(fake("wide", constraints=[HeadDimUpTo(64)]), fake("tall"), fake("late"))
    decision = dispatch.choose(EVERYDAY)
    assert decision.backend == "tall"
    assert decision.native
    assert "wide needs a head_dim of at most 64" in decision.reason


def test_a_refusal_names_every_backend_and_its_objection(registry):
    registry(fake("a", constraints=[HeadDimUpTo(64)]), fake("b", constraints=[OnDevice(("cuda",))]))
    decision = dispatch.choose(EVERYDAY)
    assert decision.backend is None
    assert decision.reason == "a needs a head_dim of at most 64; b needs tensors on cuda"


def test_emulation_answers_only_where_it_is_allowed(registry):
    registry(fake("slow", native=False))
    assert dispatch.choose(EVERYDAY).backend == "slow"
    refused = dispatch.choose(EVERYDAY, emulation=False)
    assert refused.backend is None
    assert "no native int8 kernel" in refused.reason


def test_a_backend_asked_for_by_name_is_used_or_refused_by_name(registry):
    registry(fake("one"), fake("two"))
    assert dispatch.choose(EVERYDAY, backend="two").backend == "two"
    assert "no backend is named 'three'" in dispatch.choose(EVERYDAY, backend="three").reason


def test_a_backend_that_is_never_taken_unasked_answers_only_to_its_name(registry):
    registry(fake("preview", native=False, unasked=None), fake("everyday", native=False))
    assert dispatch.choose(EVERYDAY) == ("everyday", False, "")
    assert dispatch.choose(EVERYDAY, backend="preview").backend == "preview"


def test_a_backend_is_taken_unasked_where_it_gains(registry):
    registry(fake("long", unasked=(TokensFrom(5000), NotCausal())), fake("everyday"))
    doubt = "to be faster than the host's attention"
    decision = dispatch.choose(EVERYDAY)
    assert decision == ("everyday", True, f"long needs at least 5000 tokens {doubt}")
    assert dispatch.choose(EVERYDAY, backend="long") == ("long", True, "")
    long = EVERYDAY._replace(q_len=5000, kv_len=6000)
    assert dispatch.choose(long) == ("long", True, "")
    assert dispatch.choose(long._replace(kv_len=4999)).backend == "everyday"
    causal = dispatch.choose(long._replace(causal=True))
    assert causal == ("everyday", True, f"long needs a call that is not causal {doubt}")


def test_a_backend_that_failed_its_self_test_is_passed_over_with_the_reason(registry):
    registry(fake("wrong"), fake("right"), faults={"wrong": "wrong failed its self-test"})
    decision = dispatch.choose(EVERYDAY)
    assert decision.backend == "right"
    assert decision.reason == "wrong failed its self-test"


def test_no_inference_backend_is_chosen_where_a_gradient_is_needed(registry):
    registry(fake("fast"))
    decision = dispatch.choose(EVERYDAY._replace(needs_grad=True))
    assert decision.backend is None
    assert "gradient" in decision.reason


def test_training_goes_only_to_a_backend_with_a_backward_pass(registry):
    training = EVERYDAY._replace(needs_grad=True, trainable=True)
    registry(fake("forward_only"), fake("trains", train=never))
    assert dispatch.choose(training).backend == "trains"
    assert "int8 trains" in dispatch.choose(training._replace(precision="fp4")).reason


def test_a_backend_for_training_alone_never_serves_inference(registry):
    trains = replace(fake("trains", train=never), forward=None)
    registry(trains, fake("infers"))
    training = EVERYDAY._replace(needs_grad=True, trainable=True)
    assert dispatch.choose(training).backend == "trains"
    assert dispatch.choose(EVERYDAY) == ("infers", True, "")
    refused = dispatch.choose(EVERYDAY, backend="trains")
    assert refused == (None, False, "trains serves training alone")


@pytest.mark.parametrize(
    ("change", "backend"),
    [
        ({}, "sm90_sagebwd"),
        ({"q_len": 16383}, None),
        ({"kv_len": 16383}, None),
        ({"head_dim": 64}, None),
        ({"causal": True}, None),
        ({"capability": (8, 9)}, None),
    ],
)
def test_training_takes_the_kernels_of_hopper_where_they_measured_faster(
    monkeypatch, change, backend
):
    monkeypatch.setattr(selftest, "fault", lambda *_: None)
    long = EVERYDAY._replace(device="cuda", device_index=0, capability=(9, 0))
    long = long._replace(dtype=torch.bfloat16, needs_grad=True, trainable=True, head_dim=128)
    long = long._replace(q_len=16384, kv_len=16384)._replace(**change)
    assert dispatch.choose(long, emulation=False).backend == backend
    named = dispatch.choose(long, emulation=False, backend="sm90_sagebwd").backend
    assert named == (None if "capability" in change else "sm90_sagebwd")


def test_head_dims_in_several_ranges_are_described_as_such():
    constraint = HeadDimIn(((1, 64), (97, 128)))
    admitted = [d for d in range(1, 200) if constraint.admits(EVERYDAY._replace(head_dim=d))]
    assert admitted == [*range(1, 65), *range(97, 129)]
    assert constraint.describe() == "a head_dim of 1 to 64 or 97 to 128"


def test_fp16_is_never_computed_by_a_kernel(registry):
    registry(fake("all", precisions=tuple(kernels.PRECISIONS)))
    assert dispatch.choose(EVERYDAY._replace(precision="fp16")).backend is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "mps"}, "tensors on cpu or cuda"),
        ({"device": "mps"}, "compute capability 8.0 to 12.1"),
        ({"device": "cuda", "capability": (7, 5), "head_dim": 512}, "capability 8.0 to 12.1"),
        (
            {"device": "cuda", "capability": (9, 0), "dtype": torch.float64, "head_dim": 512},
            "sm80_int8 needs float16 or bfloat16 or float32",
        ),
        ({"head_dim": 512}, "head_dim of at most 256"),
    ],
)
def test_the_backends_declare_their_limits(change, words):
    decision = dispatch.choose(EVERYDAY._replace(**change))
    assert decision.backend is None
    assert words in decision.reason


def test_capability_is_read_from_the_device_of_the_tensors(monkeypatch):
    from sageattention3.kernels import request

    table = {0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: table[device.index])
    assert request.compute_capability(torch.device("cuda", 1)) == (9, 0)
    assert request.compute_capability(torch.device("cuda", 0)) == (7, 5)
    assert request.compute_capability(torch.device("cpu")) is None
