"""Layouts and the tracker, on described blocks alone: no host, no model."""

import pytest
from sageattention3.nodes.engine.layers import STATE_KEY, BlockState, LayerTracker
from sageattention3.nodes.engine.layout import Layout, describe_model

from .layouts import HUNYUAN, UNKNOWN, WAN

TOKENS, TEXT = 64, 8


class Run:
    """One forward pass as a hooked family of the host makes it, step by step."""

    def __init__(self, layout, **options):
        self.tracker = LayerTracker(layout)
        self.options = self.tracker.begin_forward(options)

    def call(self, q_len=TOKENS, kv_len=TOKENS, options=None):
        return self.tracker.identify(options or self.options, q_len, kv_len)

    def block(self, kind, index, *lengths):
        """Run a block that calls attention with ``lengths``. Returns its options, for a replay."""
        seen = {}

        def original_block(args):
            seen["options"] = args["transformer_options"]
            seen["calls"] = [self.call(*pair, seen["options"]) for pair in lengths]
            return args

        hook = self.options["patches_replace"]["dit"][kind, index]
        hook({"transformer_options": self.options}, {"original_block": original_block})
        return seen["options"], [call.id for call in seen["calls"]]


def test_stacks_blocks_and_ids_stand_in_execution_order():
    assert list(HUNYUAN.stacks) == ["refiner", "double", "single"]
    assert HUNYUAN.layer_ids[:4] == ("refiner.0", "refiner.1", "double.0", "double.1")
    assert HUNYUAN.blocks[0].id == "double.0"  # a refiner is no block of the main stacks
    assert HUNYUAN.summary() == "refiner.0-1, double.0-3, single.0-5"
    assert WAN.summary() == "block.0-4 (self, cross)"


def test_an_object_of_no_known_class_has_an_unknown_layout():
    layout = describe_model(object())
    assert (layout.known, layout.layer_ids) == (False, ())
    assert layout.has("call.7")
    assert not layout.has("double.0")


def test_a_class_of_the_same_name_elsewhere_is_not_the_hosts():
    flux = type("Flux", (), {"__module__": "somewhere.flux.model"})
    assert not describe_model(flux()).known


def test_calls_before_the_first_hooked_block_are_counted():
    run = Run(HUNYUAN)
    assert [run.call().id, run.call().id] == ["refiner.0", "refiner.1"]
    assert run.block("double_block", 0, (TOKENS, TOKENS))[1] == ["double.0"]


def test_a_call_that_no_layer_accounts_for_is_other_and_shifts_nothing():
    run = Run(HUNYUAN)
    run.block("double_block", 1, (TOKENS, TOKENS))
    assert run.call().id == "other"
    assert run.call(TOKENS, TEXT) == ("other", "cross", False)
    assert run.block("double_block", 2, (TOKENS, TOKENS))[1] == ["double.2"]


def test_options_that_no_forward_pass_began_name_no_layer():
    assert LayerTracker(HUNYUAN).identify({}, TOKENS, TOKENS).id == "other"
    assert LayerTracker(HUNYUAN).identify({}, TOKENS, TEXT).role == "cross"


def test_two_passes_at_once_keep_apart():
    tracker = LayerTracker(HUNYUAN)
    one, two = tracker.begin_forward({}), tracker.begin_forward({})
    ids = [tracker.identify(options, 8, 8).id for options in (one, two, two, one)]
    assert ids == ["refiner.0", "refiner.0", "refiner.1", "refiner.1"]


def test_a_pass_within_a_pass_begins_anew():
    outer = Run(HUNYUAN)
    outer.call()
    inner = outer.tracker.begin_forward(outer.options)
    assert outer.tracker.identify(inner, 8, 8).id == "refiner.0"
    assert outer.call().id == "refiner.1"


def test_a_block_run_again_later_keeps_its_name_whatever_ran_since():
    run = Run(WAN)
    lengths = (TOKENS, TOKENS), (TOKENS, TEXT)
    options, ids = run.block("double_block", 1, *lengths)
    run.block("double_block", 4, *lengths)
    assert ids == ["block.1.self", "block.1.cross"]
    assert [run.call(*pair, options).id for pair in lengths] == ids
    assert [run.call(*pair, options).id for pair in reversed(lengths)] == ids[::-1]


def test_a_block_run_again_with_calls_of_equal_lengths_goes_by_their_turn():
    run = Run(WAN)
    lengths = (TOKENS, TOKENS), (TOKENS, TOKENS)
    options, ids = run.block("double_block", 1, *lengths)
    assert ids == ["block.1.self", "block.1.cross"]
    assert [run.call(*pair, options).id for pair in lengths] == ids


def test_a_block_without_options_runs_as_it_is():
    run = Run(WAN)
    hook = run.options["patches_replace"]["dit"]["double_block", 0]
    args = {"img": 1}
    assert hook(args, {"original_block": lambda given: given}) is args


def test_decide_is_asked_once_per_hooked_block_and_its_answer_travels_with_the_block():
    asked = []

    def decide(layers):
        asked.append([layer.id for layer in layers])
        return len(asked)

    run = Run(WAN)
    run.options = run.tracker.begin_forward({}, decide=decide)
    assert sorted(asked) == [[f"block.{i}.self", f"block.{i}.cross"] for i in range(5)]
    options, _ = run.block("double_block", 3)
    assert options[STATE_KEY].decision == 1 + asked.index(["block.3.self", "block.3.cross"])


def test_the_callers_options_are_copied_not_changed():
    mine = {"patches_replace": {"dit": {}}, "sigmas": 1}
    options = LayerTracker(WAN).begin_forward(mine)
    assert mine == {"patches_replace": {"dit": {}}, "sigmas": 1}
    assert set(options) == {"patches_replace", "sigmas", STATE_KEY}


def test_a_block_state_is_all_that_a_block_sees_of_us():
    run = Run(WAN)
    options, _ = run.block("double_block", 0)
    assert isinstance(options[STATE_KEY], BlockState)
    assert not isinstance(run.options[STATE_KEY], BlockState)


@pytest.mark.parametrize("layout", [UNKNOWN, Layout("empty")])
def test_families_without_hooks_add_no_replace_functions(layout):
    assert "patches_replace" not in LayerTracker(layout).begin_forward({})
