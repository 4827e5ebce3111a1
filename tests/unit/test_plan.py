"""Plans: what presets mean, which gate sends a call to the host, and which settings are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sageattention3.kernels import PRECISIONS
from sageattention3.nodes.engine.families import LayerCall
from sageattention3.nodes.engine.plan import CUSTOM, FP16, PRESETS, PlanError, Wanted, make_plan
from sageattention3.nodes.engine.profile import ProfileError
from sageattention3.nodes.engine.selector import SelectorError

from .layouts import HUNYUAN, UNKNOWN, WAN, WAN_I2V
from .profiles import profile_of

LONG = 4096


def wanted(plan, layer, role="joint", in_window=True, q_len=LONG, kv_len=LONG):
    return plan.wanted(LayerCall(layer, role, True), in_window, q_len, kv_len)


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


ERRORS = {
    "fp4": {"double.1": 0.5, "double.2": 0.5, "double.3": 0.01},
    "int8": {"double.1": 0.01, "double.2": 0.5},
}


def test_with_a_profile_each_layer_runs_in_what_max_error_allows():
    plan = make_plan(HUNYUAN, preset="quality", profile=profile_of(ERRORS), max_error=0.1)
    assert wanted(plan, "double.1") == Wanted(("int8",), "")
    assert wanted(plan, "double.2") == Wanted(FP16, "kept in fp16 for max_error 0.1")
    assert wanted(plan, "double.3") == Wanted(("fp4",), "")
    assert wanted(plan, "single.1") == Wanted(FP16, "the profile has no measurement of it")
    assert plan.per_layer
    assert plan.title == "max_error 0.1"
    assert plan.note.startswith("Fastest within max_error 0.1: 1 layer in int8 (double.1)")


def test_a_profile_takes_the_place_of_the_preset_and_leaves_the_other_gates():
    errors = {"fp4": {"block.0.self": 0.01, "block.0.cross": 0.01, "block.1.self": 0.01}}
    plan = make_plan(
        WAN, preset="quality", profile=profile_of(errors), max_error=1.0, fp16_layers="block.1"
    )
    assert wanted(plan, "block.0.self", "self").precisions == ("fp4",)  # quality keeps block 0
    kept = wanted(plan, "block.0.cross", "cross")
    assert kept == Wanted(FP16, "cross-attention kept in fp16")
    assert wanted(plan, "block.1.self", "self") == Wanted(FP16, "kept in fp16 by fp16_layers")


@pytest.mark.parametrize(
    "gate", [{"fp16_layers": "double.1"}, {"min_tokens": 5000}, {"cross_attention": "fp16"}]
)
def test_layers_that_stay_in_fp16_anyway_take_nothing_of_the_budget(gate):
    # Alone, either layer fits the budget; both together do not.
    layout, first, second = HUNYUAN, "double.1", "double.2"
    if "cross_attention" in gate:
        layout, first, second = WAN, "block.1.cross", "block.1.self"
    profile = profile_of({"fp4": {first: 0.07, second: 0.07}})
    profile.tokens[0] = 4096
    profile.tokens[1] = 8192
    both = {"cross_attention": "same", "min_tokens": 0}
    plan = make_plan(layout, profile=profile, max_error=0.1, **both)
    assert sorted(plan.by_layer.values()) == ["fp16", "fp4"]
    plan = make_plan(layout, profile=profile, max_error=0.1, **{**both, **gate})
    assert plan.by_layer == {first: "fp16", second: "fp4"}


def test_only_candidates_are_chosen():
    errors = {p: {"double.1": 0.01} for p in ("fp4", "int8")}
    plan = make_plan(HUNYUAN, profile=profile_of(errors), max_error=1.0, candidates=("int8",))
    assert plan.by_layer == {"double.1": "int8"}


def test_a_profile_of_layers_that_the_model_lacks_is_refused():
    with pytest.raises(ProfileError, match=r"block\.7.*double\.0-3"):
        make_plan(HUNYUAN, profile=profile_of({"int8": {"block.7": 0.2, "double.1": 0.1}}))


def test_a_profile_of_an_unknown_architecture_counts_calls():
    plan = make_plan(UNKNOWN, profile=profile_of({"int8": {"call.3": 0.2, "call.4": 0.01}}))
    assert wanted(plan, "call.3").precisions == FP16
    assert wanted(plan, "call.4").precisions == ("int8",)


@pytest.mark.parametrize("max_error", [-0.1, math.nan, math.inf])
def test_a_budget_that_is_none_is_refused(max_error):
    with pytest.raises(PlanError, match="max_error is"):
        make_plan(HUNYUAN, profile=profile_of(ERRORS), max_error=max_error)


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
