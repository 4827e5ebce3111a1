"""Plans: what presets mean, which gate sends a call to the host, and which settings are refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sageattention3.kernels import PRECISIONS
from sageattention3.nodes.engine.families import LayerCall
from sageattention3.nodes.engine.plan import CUSTOM, FP16, PRESETS, PlanError, Wanted, make_plan
from sageattention3.nodes.engine.profile import Fingerprint, Profile, ProfileError
from sageattention3.nodes.engine.selector import SelectorError

from .layouts import HUNYUAN, UNKNOWN, WAN, WAN_I2V

LONG = 4096


def wanted(plan, layer, role="joint", in_window=True, q_len=LONG, kv_len=LONG):
    return plan.wanted(LayerCall(layer, role, True), in_window, q_len, kv_len)


def profile(errors, max_error=0.1):
    return Profile("hunyuan_video", Fingerprint("", torch.zeros(0)), errors, max_error, "0")


def test_balanced_is_int8_everywhere():
    plan = make_plan(HUNYUAN, preset="balanced")
    assert {wanted(plan, layer) for layer in HUNYUAN.layer_ids} == {Wanted(("int8",), "")}


def test_quality_keeps_the_first_and_last_block_in_fp16():
    plan = make_plan(HUNYUAN, preset="quality")
    kept = {layer for layer in HUNYUAN.layer_ids if wanted(plan, layer).precisions == FP16}
    assert kept == {"double.0", "single.5"}
    assert wanted(plan, "double.0").reason == "kept in fp16 by preset quality"


def test_quality_keeps_all_calls_of_an_edge_block():
    plan = make_plan(WAN, preset="quality", cross_attention="same")
    assert wanted(plan, "block.4.cross", "cross").precisions == FP16


def test_speed_wants_fp4_then_int8_but_not_at_the_ends_of_sampling():
    plan = make_plan(HUNYUAN, preset="speed")
    assert (plan.start_percent, plan.end_percent) == (0.1, 0.9)
    assert wanted(plan, "double.1") == Wanted(("fp4", "int8"), "")
    assert wanted(plan, "double.1", in_window=False) == Wanted(FP16, "step outside 0.1..0.9")


def test_custom_takes_the_widgets_and_nothing_else():
    plan = make_plan(
        HUNYUAN, preset=CUSTOM, precision="int8_fp4", start_percent=0.2, end_percent=0.7
    )
    assert (plan.start_percent, plan.end_percent) == (0.2, 0.7)
    assert wanted(plan, "double.0") == Wanted(("int8_fp4",), "")
    assert not plan.per_layer


@pytest.mark.parametrize("preset", PRESETS)
def test_precision_and_window_widgets_do_not_change_a_preset(preset):
    widgets = {"precision": "fp16", "start_percent": 0.4, "end_percent": 0.3}
    assert make_plan(HUNYUAN, preset=preset, **widgets) == make_plan(HUNYUAN, preset=preset)


@pytest.mark.parametrize("preset", [*PRESETS, CUSTOM])
def test_fp16_layers_adds_exceptions_to_every_preset(preset):
    plan = make_plan(HUNYUAN, preset=preset, fp16_layers="single.2")
    assert wanted(plan, "single.2") == Wanted(FP16, "kept in fp16 by fp16_layers")
    assert plan.per_layer


def test_all_exceptions_leave_every_call_to_the_host():
    plan = make_plan(HUNYUAN, fp16_layers="*")
    assert {wanted(plan, layer).precisions for layer in HUNYUAN.layer_ids} == {FP16}


def test_a_plan_of_fp16_wants_nothing_else():
    plan = make_plan(HUNYUAN, preset=CUSTOM, precision="fp16")
    assert wanted(plan, "double.1") == Wanted(FP16, "the plan is fp16")


@pytest.mark.parametrize("role", ["cross", "image", "text", "audio", "time_cross"])
def test_cross_attention_of_every_kind_follows_its_policy(role):
    kept = wanted(make_plan(WAN_I2V), f"block.1.{role}", role)
    assert kept == Wanted(FP16, "cross-attention kept in fp16")
    same = make_plan(WAN_I2V, cross_attention="same")
    assert wanted(same, f"block.1.{role}", role) == Wanted(("int8",), "")


def test_the_cross_attention_policy_leaves_other_roles_alone():
    plan = make_plan(WAN_I2V)
    for role in ("self", "joint", "time_self"):
        assert wanted(plan, "x", role, q_len=LONG, kv_len=LONG + 512).precisions == ("int8",)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "reason"),
    [
        (1023, LONG, "fewer than min_tokens=1024 queries"),
        (LONG, 1023, "fewer than min_tokens=1024 keys"),
        (12, 12, "fewer than min_tokens=1024 keys"),
        (1024, 1024, ""),
    ],
)
def test_few_tokens_on_either_side_stay_in_fp16_and_the_reason_says_which(q_len, kv_len, reason):
    result = wanted(make_plan(HUNYUAN), "double.1", q_len=q_len, kv_len=kv_len)
    assert result.reason == reason
    assert result.precisions == (FP16 if reason else ("int8",))


def test_no_minimum_means_no_gate():
    assert wanted(make_plan(HUNYUAN, min_tokens=0), "double.1", q_len=1, kv_len=1).reason == ""


def test_a_profile_takes_from_a_layer_only_the_precisions_that_it_cannot_bear():
    errors = {
        "fp4": {"double.1": 0.3, "double.2": 0.3, "double.3": 0.05},
        "int8": {"double.1": 0.01, "double.2": 0.2},
    }
    plan = make_plan(HUNYUAN, preset="speed", profile=profile(errors))
    assert wanted(plan, "double.1") == Wanted(("int8",), "")
    assert wanted(plan, "double.2") == Wanted(FP16, "measured error above the profile's max_error")
    assert wanted(plan, "double.3") == Wanted(("fp4", "int8"), "")
    assert wanted(plan, "single.1") == Wanted(("fp4", "int8"), "")  # not measured
    assert plan.per_layer


def test_a_profile_of_layers_that_the_model_lacks_is_refused():
    with pytest.raises(ProfileError, match=r"block\.7.*double\.0-3"):
        make_plan(HUNYUAN, profile=profile({"int8": {"block.7": 0.2, "double.1": 0.1}}))


def test_a_profile_of_an_unknown_architecture_counts_calls():
    plan = make_plan(UNKNOWN, profile=profile({"int8": {"call.3": 0.2}}))
    assert wanted(plan, "call.3").precisions == FP16


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"preset": "turbo"}, "unknown preset `turbo`: choose balanced, quality, speed, custom"),
        ({"precision": "fp8"}, "unknown precision `fp8`"),
        ({"start_percent": 0.6, "end_percent": 0.4}, "0.6 is not below end_percent 0.4"),
        ({"start_percent": 0.5, "end_percent": 0.5}, "no step would be quantised"),
        ({"start_percent": -0.1}, "start_percent is -0.1"),
        ({"end_percent": 1.5}, "end_percent is 1.5"),
        ({"end_percent": math.nan}, "end_percent is nan"),
        ({"cross_attention": "int8"}, "unknown cross_attention `int8`: choose fp16 or same"),
        ({"min_tokens": -1}, "min_tokens is -1"),
    ],
)
def test_a_setting_that_makes_no_plan_is_refused(settings, says):
    with pytest.raises(PlanError) as error:
        make_plan(HUNYUAN, **{"preset": CUSTOM, **settings})
    assert says in str(error.value)


def test_fp16_layers_that_name_nothing_are_refused():
    with pytest.raises(SelectorError, match=r"double\.0-3, single\.0-5"):
        make_plan(HUNYUAN, fp16_layers="block.0")


def test_an_unknown_architecture_is_told_that_a_preset_keeps_no_edges(caplog):
    plan = make_plan(UNKNOWN, preset="quality")
    assert not plan.fp16_layers
    assert "unknown (Novel)" in caplog.text
    caplog.clear()
    make_plan(UNKNOWN, preset="balanced")
    assert not caplog.text


@given(
    preset=st.sampled_from([*PRESETS, CUSTOM]),
    layer=st.sampled_from(WAN.layer_ids),
    in_window=st.booleans(),
    lengths=st.tuples(st.integers(1, 1 << 17), st.integers(1, 1 << 17)),
)
def test_fp16_always_comes_alone_and_with_a_reason(preset, layer, in_window, lengths):
    precisions, reason = wanted(
        make_plan(WAN, preset=preset), layer, layer.rpartition(".")[2], in_window, *lengths
    )
    assert set(precisions) <= set(PRECISIONS)
    assert (precisions == FP16) == bool(reason)
    assert precisions == FP16 or "fp16" not in precisions
