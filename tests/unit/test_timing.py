"""A race against a clock of our own: turns, pauses, medians, and who drops out."""

import pytest
import torch
from sageattention3.kernels import timing
from sageattention3.kernels.shapes import IMAGE_MODELS, VIDEO_MODELS, Shape, random_qkv
from sageattention3.kernels.timing import CALLS_PER_ROUND, PAUSE_SECONDS, ROUND_SECONDS, race


class Clock:
    """A Timer whose calls say themselves how long they take."""

    def __init__(self):
        self.turns = []  # (call, times), and pauses in seconds

    def __call__(self, call, times):
        self.turns.append((call, times))
        return [call() for _ in range(times)]

    def rest(self, seconds):
        self.turns.append(seconds)


def test_contestants_take_turns_and_each_turn_begins_with_a_pause():
    clock = Clock()
    a, b = (lambda: 10.0), (lambda: 25.0)
    assert race({"a": a, "b": b}, clock, rounds=2, rest=clock.rest) == ({"a": 10, "b": 25}, {})
    times_a, times_b = int(ROUND_SECONDS * 1e3 / 10), int(ROUND_SECONDS * 1e3 / 25)
    a_round = [PAUSE_SECONDS, (a, times_a), PAUSE_SECONDS, (b, times_b)]
    assert clock.turns == [(a, 1), (a, 1), (b, 1), (b, 1), *a_round, *a_round]


def test_the_first_call_may_build_a_kernel_and_is_not_counted():
    times = iter([60_000.0])
    result = race({"a": lambda: next(times, 2.0)}, Clock(), rounds=1, rest=lambda _: None)
    assert result.milliseconds == {"a": 2.0}


def test_the_median_of_all_rounds_counts():
    times = iter([1.0, 30.0, 1.0, 9.0, 2.0, 3.0])  # two that don't count, then two each round
    result = race({"a": lambda: next(times)}, Clock(), rounds=2, rest=lambda _: None)
    assert result.milliseconds == {"a": 2.5}


@pytest.mark.parametrize(("first", "calls"), [(1000.0, CALLS_PER_ROUND[0]), (0.01, 20)])
def test_slow_calls_run_a_few_times_and_fast_ones_not_without_end(first, calls):
    clock = Clock()
    race({"a": lambda: first}, clock, rounds=1, rest=lambda _: None)
    assert clock.turns[-1][1] == calls


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, ValueError])
def test_who_fails_drops_out_with_its_reason_and_the_others_go_on(error):
    def fails():
        raise error("no room\nfor all this")

    result = race({"a": fails, "b": lambda: 1.0}, Clock(), rounds=1, rest=lambda _: None)
    assert result == ({"b": 1.0}, {"a": "no room"})


def test_other_errors_are_not_swallowed():
    with pytest.raises(KeyError):
        race({"a": lambda: {}["x"]}, Clock(), rest=lambda _: None)


class Event:
    """A CUDA event on a clock that a test moves."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def elapsed_time(self, end):
        return end.at - self.at


def test_gpu_times_are_read_after_the_gpu_is_done_and_hold_the_call_alone(monkeypatch):
    log = []

    class Flushed:
        device = "cuda:1"

        def zero_(self):
            Event.now += 100
            log.append("flush")

    class Device:
        def __init__(self, device):
            log.append(device)

        def __enter__(self):
            log.append("enter")

        def __exit__(self, *_):
            log.append("leave")

    def call():
        Event.now += 7
        log.append("call")

    monkeypatch.setattr(timing.torch, "empty", lambda *_, **options: Flushed())
    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "device", Device)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: log.append("synchronize"))
    assert timing.GpuTimer("cuda:1")(call, 2) == [7.0, 7.0]
    turn = ["flush", "call"]
    assert log == ["cuda:1", "enter", *turn, *turn, "synchronize", "leave"]


def test_tensors_of_a_shape_are_token_major_and_the_same_every_time():
    shape = Shape("", 2, 3, 5, 8)
    tensors, again = random_qkv(shape, "cpu"), random_qkv(shape, "cpu")
    for x, y in zip(tensors, again, strict=True):
        assert x.shape == (2, 3, 5, 8)
        assert x.dtype == torch.bfloat16
        assert x.transpose(1, 2).is_contiguous()
        assert torch.equal(x, y)
    assert not torch.equal(tensors[0], tensors[1])


def test_models_are_known_by_names_of_their_own():
    names = [shape.name for shape in (*IMAGE_MODELS, *VIDEO_MODELS)]
    assert len(set(names)) == len(names) == 5
