"""Selectors: what text names which layers, and what an error says."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sageattention3.nodes.engine.families import Block
from sageattention3.nodes.engine.layout import Layout
from sageattention3.nodes.engine.selector import SelectorError, parse_selector

from .layouts import HUNYUAN, UNKNOWN, WAN, WAN_I2V


def _unet_block(side, number, i):
    return Block(side, (number, i), ("self", "cross"), named_roles=True)


UNET = Layout(
    "unet",
    tuple(
        _unet_block(*where)
        for where in [("input", 1, 0), ("input", 4, 0), ("input", 4, 1), ("middle", 0, 0)]
    ),
)


def resolve(text, layout=HUNYUAN):
    return parse_selector(text).resolve(layout)


@pytest.mark.parametrize(
    ("text", "layout", "ids"),
    [
        ("", HUNYUAN, ""),
        (" , ,", HUNYUAN, ""),
        ("double.3", HUNYUAN, "double.3"),
        ("double.0-2", HUNYUAN, "double.0 double.1 double.2"),
        ("double.-1", HUNYUAN, "double.3"),
        ("double.-4", HUNYUAN, "double.0"),
        ("refiner.*", HUNYUAN, "refiner.0 refiner.1"),
        ("DOUBLE.0 ,Refiner . 1", HUNYUAN, "double.0 refiner.1"),
        ("double.2.joint", HUNYUAN, "double.2"),
        ("*.self", HUNYUAN, "refiner.0 refiner.1"),
        ("first 2", HUNYUAN, "double.0 double.1"),
        ("last  1", HUNYUAN, "single.5"),
        ("first 1, last 1", WAN, "block.0.self block.0.cross block.4.self block.4.cross"),
        ("block.4", WAN, "block.4.self block.4.cross"),
        ("block.4.self", WAN, "block.4.self"),
        ("0, -1", WAN, "block.0.self block.0.cross block.4.self block.4.cross"),
        ("1-2.self", WAN, "block.1.self block.2.self"),
        ("block.1.cross", WAN_I2V, "block.1.image block.1.text"),
        ("block.1.text", WAN_I2V, "block.1.text"),
        ("input.4.1.self", UNET, "input.4.1.self"),
        ("input.4.*.self", UNET, "input.4.0.self input.4.1.self"),
        ("input.-1.0", UNET, "input.4.0.self input.4.0.cross"),
        ("input.1", UNET, "input.1.0.self input.1.0.cross"),
        ("input.2-4.1", UNET, "input.4.1.self input.4.1.cross"),
        ("call.3", UNKNOWN, "call.3"),
        (
            "double.0; double.1\nrefiner.0\r\n;refiner.1",
            HUNYUAN,
            "double.0 double.1 refiner.0 refiner.1",
        ),
        (
            "double.0\uff0cdouble.1\uff1bdouble.2\u3001double.3",
            HUNYUAN,
            "double.0 double.1 double.2 double.3",
        ),
        ("double.0\u20132", HUNYUAN, "double.0 double.1 double.2"),
        ("\uff44ouble\uff0e\uff10\uff0d\uff11", HUNYUAN, "double.0 double.1"),
        ("double.\u22121, refiner\u3002\uff0a", HUNYUAN, "double.3 refiner.0 refiner.1"),
        ("first\u3000\uff12", HUNYUAN, "double.0 double.1"),
        ("call.0-2", UNKNOWN, "call.0 call.1 call.2"),
        ("7", UNKNOWN, "call.7"),
        ("first 2", UNKNOWN, "call.0 call.1"),
    ],
)
def test_text_names_layers(text, layout, ids):
    assert resolve(text, layout) == set(ids.split())


def test_star_names_every_layer():
    assert resolve("*") == set(HUNYUAN.layer_ids)
    assert resolve("*.*") == set(HUNYUAN.layer_ids)


def test_every_layer_id_names_itself_alone():
    for layout in (HUNYUAN, WAN, WAN_I2V, UNET):
        for layer in layout.layer_ids:
            assert resolve(layer, layout) == {layer}


@pytest.mark.parametrize(
    ("text", "layout", "says"),
    [
        ("double.4", HUNYUAN, ["`double.4`", "out of range", "double.0-3", "single.0-5"]),
        ("double.2-4", HUNYUAN, ["`double.2-4`", "out of range"]),
        ("double.-5", HUNYUAN, ["out of range"]),
        ("triple.0", HUNYUAN, ["no `triple`", "refiner.0-1, double.0-3, single.0-5"]),
        ("single.*.cross", HUNYUAN, ["role `cross`", "only joint"]),
        ("*.audio", WAN, ["role `audio`", "only self, cross"]),
        ("0", HUNYUAN, ["ambiguous", "refiner, double, single", "`refiner.0`"]),
        ("last 11", HUNYUAN, ["`last 11`", "only 10 blocks"]),
        ("input.2", UNET, ["out of range", "input.1,4 (self, cross)"]),
        ("double.1.1", HUNYUAN, ["too many numbers"]),
        ("first 0", HUNYUAN, ["count from 1"]),
        ("double", HUNYUAN, ["`double.*`"]),
        ("cross", WAN, ["`*.cross`"]),
        (
            "double.x",
            HUNYUAN,
            ["`double.x`: after `double.` a number", "`double.0-2`", "`double.*`"],
        ),
        ("block.self", WAN, ["a range or `*` is expected", "`block.*.self`"]),
        ("double.3-1", HUNYUAN, ["smaller number first"]),
        ("double.x1!", HUNYUAN, ["`double.x1!` is not a layer"]),
        ("double:3", HUNYUAN, ["`double:3` is not a layer"]),
        ("double.0, single.99", HUNYUAN, ["`single.99`"]),
        ("last 1", UNKNOWN, ["unknown (Novel)", "count from the start"]),
        ("call.-1", UNKNOWN, ["number of its layers is not known"]),
        ("call.*", UNKNOWN, ["number of its layers is not known"]),
        ("double.0", UNKNOWN, ["layers have only numbers"]),
        ("call.0.self", UNKNOWN, ["layers have only numbers"]),
        ("call.0-99999", UNKNOWN, ["no model makes that many"]),
        ("first 99999", UNKNOWN, ["no model makes that many"]),
    ],
)
def test_an_error_names_the_bad_part_and_what_the_model_has(text, layout, says):
    with pytest.raises(SelectorError) as error:
        resolve(text, layout)
    for words in says:
        assert words in str(error.value)


LONG = 1_000_000


@pytest.mark.parametrize(
    "text",
    [
        "x" * LONG,
        "!" * LONG,
        "double." + "x" * LONG,
        "x" * LONG + ".0",
        "double.0." + "x" * LONG,
        "double" + ".1" * LONG,
        "1" + ".1" * LONG,
        "double." + "9" * LONG,
        "double.0." + "x" * LONG + ".0",
        "first " + "9" * LONG,
        "double.0, " + "y" * LONG,
    ],
    ids=lambda text: f"{text[:12]}",
)
@pytest.mark.parametrize("layout", [HUNYUAN, WAN, UNKNOWN], ids=["hunyuan", "wan", "unknown"])
def test_an_error_quotes_no_more_than_a_dialog_shows(text, layout):
    with pytest.raises(SelectorError) as error:
        resolve(text, layout)
    assert len(str(error.value)) < 600


_number = st.integers(0, 999)
_index = st.one_of(
    _number.map(str),
    st.integers(-999, -1).map(str),
    st.tuples(_number, _number).map(lambda pair: f"{min(pair)}-{max(pair)}"),
    st.just("*"),
)
_role = st.sampled_from(["", ".self", ".cross", ".joint"])
_part = st.one_of(
    st.builds("{} {}".format, st.sampled_from(["first", "last"]), st.integers(1, 99)),
    st.builds("{}.{}{}".format, st.sampled_from(["double", "single", "*"]), _index, _role),
    st.builds("{}.{}.{}{}".format, st.sampled_from(["input", "output"]), _index, _index, _role),
    _index.filter(lambda text: text != "*"),
)
_valid_part = st.sampled_from(
    ["double.0", "double.1-3", "double.-1", "single.*", "first 2", "last 3", "*.self", "refiner.1"]
)


@given(st.lists(_part))
def test_a_selector_survives_being_written_out(parts):
    selector = parse_selector(", ".join(parts))
    assert parse_selector(str(selector)) == selector


@given(st.lists(_valid_part, max_size=6), st.randoms())
def test_order_and_repeats_mean_nothing(parts, random):
    shuffled = parts + parts[: len(parts) // 2]
    random.shuffle(shuffled)
    assert parse_selector(",".join(shuffled)) == parse_selector(",".join(parts))
    assert resolve(",".join(shuffled)) == resolve(",".join(parts))


@given(st.lists(_valid_part, max_size=6))
def test_a_list_names_what_its_parts_name(parts):
    assert resolve(",".join(parts)) == set().union(*(resolve(part) for part in parts))


@given(
    st.one_of(
        st.text(),
        st.text(alphabet="double.single*-0123456789, first last cross:\t"),
        st.lists(st.one_of(_part, st.text(max_size=5))).map(",".join),
    ),
    st.sampled_from([HUNYUAN, WAN, UNET, UNKNOWN]),
)
def test_any_text_gives_layers_of_the_model_or_a_selector_error(text, layout):
    with contextlib.suppress(SelectorError):
        assert all(layout.has(layer) for layer in resolve(text, layout))
