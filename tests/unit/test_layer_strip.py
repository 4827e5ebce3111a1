"""What the strip of layers is told: every layer once, what holds it in fp16, and its error."""

import json

from sageattention3.nodes.engine.layer_strip import layer_strip
from sageattention3.nodes.engine.plan import make_plan

from .layouts import HUNYUAN, UNKNOWN, WAN
from .profiles import profile_of


def kept(layout, text="", profile=None, **settings):
    plan = make_plan(layout, fp16_layers=text, profile=profile, **settings)
    [strip] = layer_strip(plan, layout, text, profile)
    json.dumps(strip)  # plain values: it goes to the browser
    assert strip["fp16_layers"] == text
    return strip["layers"]


def test_every_layer_stands_once_in_the_order_in_which_it_runs():
    layers = kept(HUNYUAN)
    assert [layer["id"] for layer in layers] == list(HUNYUAN.layer_ids)
    assert list(dict.fromkeys(layer["stack"] for layer in layers)) == [
        "refiner",
        "double",
        "single",
    ]
    assert {layer["kept"] for layer in layers} == {""}


def test_the_strip_tells_what_holds_a_layer_in_fp16():
    reasons = {
        layer["id"]: layer["kept"]
        for layer in kept(WAN, "block.1", preset="quality")
        if layer["kept"]
    }
    assert reasons.pop("block.0.self") == reasons.pop("block.4.self") == "preset quality"
    assert reasons.pop("block.1.self") == reasons.pop("block.1.cross") == "fp16_layers"
    assert reasons.pop("block.2.cross") == "cross_attention"
    assert "block.2.self" not in reasons


def test_what_the_text_names_is_the_texts_even_where_the_preset_keeps_it_too():
    """The strip takes a layer out of the text; one that the preset keeps it could not."""
    [first] = [x for x in kept(WAN, "block.0", preset="quality") if x["id"] == "block.0.self"]
    assert first["kept"] == "fp16_layers"


def test_a_profile_brings_the_precision_of_each_layer_and_its_mean_error_in_the_hardest_one():
    layers = dict.fromkeys(HUNYUAN.layer_ids, 0.001)
    errors = {"int8": layers, "fp4": {**layers, "double.1": [0.5, 0.25]}}
    seconds = {p: dict.fromkeys(layers, 1 / (i + 1)) for i, p in enumerate(("fp16", "int8", "fp4"))}
    profile = profile_of(errors, sigmas=(1.0, 0.5, 0.0), seconds=seconds)
    shown = {x["id"]: x for x in kept(HUNYUAN, profile=profile, max_error=0.1)}
    assert shown["double.1"]["error"] == 0.375
    assert shown["double.1"]["precision"] == "int8"
    assert shown["double.2"]["precision"] == "fp4"
    none = {x["id"]: x["kept"] for x in kept(HUNYUAN, profile=profile, max_error=0.0)}
    assert set(none.values()) == {"max_error 0"}


def test_only_measured_layers_have_an_error():
    profile = profile_of({"int8": {"double.1": 0.25, "double.2": float("nan")}})
    layers = kept(HUNYUAN, profile=profile)
    assert [layer["id"] for layer in layers if "error" in layer] == ["double.1"]


def test_a_model_whose_layers_are_not_known_has_no_strip():
    assert layer_strip(make_plan(UNKNOWN), UNKNOWN, "") == []
