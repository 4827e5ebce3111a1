"""The override decides, computes, hands over and counts; without a host, on a toy model's calls."""

import copy
import logging

import pytest
import torch
from sageattention3 import kernels
from sageattention3.nodes.engine import override as override_module
from sageattention3.nodes.engine.layout import Layout
from sageattention3.nodes.engine.ledger import HOST
from sageattention3.nodes.engine.override import make_override
from sageattention3.nodes.engine.plan import make_plan
from sageattention3.nodes.engine.session import Session
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

HEADS, DIM, TOKENS = 2, 64, 48


class Sampling:
    """The host's model_sampling, as far as a plan needs it: sigma falls from 1 to 0."""

    def percent_to_sigma(self, percent):
        return 1 - percent


class HostAttention:
    """Stands for the host's own attention; keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, q, k, v, heads, mask=None, **kwargs):
        self.calls.append(((q, k, v, heads, mask), kwargs))
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2)


class Rig:
    """A session with an open run and forward pass, called as the host's wrap_attn would call."""

    def __init__(self, previous=None, sigma=0.5, **settings):
        settings = {"min_tokens": 0, "emulation": True, **settings}
        layout = Layout("toy", known=False)
        self.session = Session(make_plan(layout, **settings), layout, previous)
        self.override = make_override(self.session)
        self.host = HostAttention()
        self.session.begin_run()
        self.begin_forward(sigma)

    def begin_forward(self, sigma=0.5):
        self.options = self.session.begin_forward(Sampling(), sigma, {})

    def __call__(self, q, k, v, *args, **kwargs):
        kwargs = {"transformer_options": self.options, "_inside_attn_wrapper": True, **kwargs}
        return self.override(self.host, q, k, v, HEADS, *args, **kwargs)

    @property
    def counts(self):
        return self.session.ledger.current.counts

    def entries(self):
        return list(self.counts.elements())


def qkv(tokens=TOKENS, kv_tokens=None, **kwargs):
    generator = torch.Generator().manual_seed(0)
    lengths = (tokens, kv_tokens or tokens, kv_tokens or tokens)
    return [
        torch.randn(1, n, HEADS * DIM, generator=generator).requires_grad_(**kwargs)
        if kwargs
        else torch.randn(1, n, HEADS * DIM, generator=generator)
        for n in lengths
    ]


def test_a_quantised_call_is_the_kernels_result_in_the_callers_layout():
    rig = Rig(preset="balanced")
    q, k, v = qkv()
    out = rig(q, k, v)
    split = [t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in (q, k, v)]
    expected = kernels.attention(*split, precision="int8")
    assert torch.equal(out, expected.transpose(1, 2).flatten(2))
    assert out.shape == q.shape
    assert not rig.host.calls
    [entry] = rig.entries()
    assert (entry.precision, entry.backend, entry.fallback) == (
        "int8",
        "reference emulation",
        False,
    )


def test_a_call_left_to_the_host_gets_its_very_arguments():
    rig = Rig(preset="custom", precision="fp16")
    q, k, v = qkv()
    mask = torch.zeros(1, 1, TOKENS, TOKENS)
    flag = object()
    rig(q, k, v, mask, future_flag=flag)
    [((*given, heads, given_mask), kwargs)] = rig.host.calls
    assert all(a is b for a, b in zip((*given, given_mask), (q, k, v, mask), strict=True))
    assert heads == HEADS
    assert kwargs["transformer_options"] is rig.options
    assert kwargs["_inside_attn_wrapper"] is True
    assert kwargs["future_flag"] is flag


def test_an_override_that_was_there_before_serves_the_calls_left_to_the_host():
    seen = []

    def foreign(func, *args, **kwargs):
        seen.append((func, kwargs["_inside_attn_wrapper"]))
        return func(*args, **kwargs)

    rig = Rig(previous=foreign, preset="custom", precision="fp16")
    rig(*qkv())
    assert seen == [(rig.host, True)]
    assert len(rig.host.calls) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"low_precision_attention": False}, "low_precision_attention"),
        ({"attn_precision": torch.float32}, "attn_precision"),
        ({"mask": object()}, "not a tensor"),
        ({"mask": torch.ones(1, TOKENS, dtype=torch.int64)}, "int64"),
    ],
)
def test_calls_no_kernel_may_serve_are_counted_with_their_reason(arguments, reason):
    rig = Rig(preset="speed")
    rig(*qkv(), **arguments)
    assert len(rig.host.calls) == 1
    [entry] = rig.entries()
    assert entry.backend == HOST
    assert entry.fallback
    assert reason in entry.reason


def test_without_emulation_a_machine_without_kernels_leaves_all_to_the_host():
    rig = Rig(preset="speed", emulation=False)
    rig(*qkv())
    [entry] = rig.entries()
    assert entry.fallback
    assert "no native fp4 kernel" in entry.reason
    assert "no native int8 kernel" in entry.reason
    assert len(rig.host.calls) == 1


def test_unknown_flags_are_named_in_the_report():
    rig = Rig()
    rig(*qkv(), future_flag=True)
    [note] = rig.session.ledger.current.notes
    assert "future_flag" in note
    assert rig.entries()[0].precision == "int8"


def test_the_window_follows_the_sigma_of_the_forward_pass():
    rig = Rig(preset="custom", precision="int8", start_percent=0.3, end_percent=0.6)
    for sigma in (1.0, 0.7, 0.5, 0.4, 0.3, 0.0):
        rig.begin_forward(sigma)
        rig(*qkv())
    assert [entry.precision for entry in rig.entries()].count("int8") == 3
    assert "outside" in next(entry.reason for entry in rig.entries() if entry.precision == "fp16")


def test_a_call_outside_of_a_forward_pass_is_the_hosts():
    rig = Rig()
    rig.override(rig.host, *qkv(), HEADS, transformer_options={}, _inside_attn_wrapper=True)
    rig.override(rig.host, *qkv(), HEADS, _inside_attn_wrapper=True)
    assert len(rig.host.calls) == 2
    assert [entry.layer for entry in rig.entries()] == ["outside", "outside"]


def test_another_sessions_forward_pass_does_not_switch_this_one_on():
    outer, inner = Rig(), Rig()
    inner.override(inner.host, *qkv(), HEADS, transformer_options=outer.options)
    assert len(inner.host.calls) == 1


def test_deep_copies_of_the_hosts_options_keep_the_override_and_its_ledger():
    rig = Rig()
    copied = copy.deepcopy({"optimized_attention_override": rig.override})
    assert copied["optimized_attention_override"] is rig.override
    assert copied["optimized_attention_override"].sageattention3 is rig.session


# --- failures ------------------------------------------------------------------------------------


def failing(error):
    def attention(*args, **kwargs):
        raise error

    return attention


def test_a_failing_backend_is_left_out_for_the_run_with_one_line_and_a_reason(monkeypatch, caplog):
    rig = Rig()
    monkeypatch.setattr(override_module, "attention", failing(RuntimeError("bad launch\nat 0x1")))
    with caplog.at_level(logging.ERROR, logger="sageattention3"):
        outs = [rig(*qkv()) for _ in range(3)]
    assert len(caplog.records) == 1
    assert len(rig.host.calls) == 3
    assert all(torch.equal(out, rig.host(*qkv(), HEADS)) for out in outs)
    assert {entry.reason for entry in rig.entries()} == {
        "reference failed: RuntimeError: bad launch"
    }
    assert all(entry.fallback for entry in rig.entries())

    monkeypatch.undo()
    rig.session.begin_run()
    rig.begin_forward()
    rig(*qkv())
    assert rig.entries()[0].precision == "int8"


@pytest.mark.parametrize(
    "error",
    [torch.cuda.OutOfMemoryError("CUDA"), RuntimeError("CUDA error: out of memory")],
    ids=["torch", "driver"],
)
def test_out_of_memory_reaches_the_host(monkeypatch, error):
    rig = Rig()
    monkeypatch.setattr(override_module, "attention", failing(error))
    with pytest.raises(type(error), match="CUDA"):
        rig(*qkv())
    assert not rig.host.calls
    assert not rig.session.broken


# --- training ------------------------------------------------------------------------------------


def test_gradients_flow_through_int8():
    rig = Rig(preset="balanced")
    leaves = qkv(requires_grad=True)
    rig(*leaves).square().mean().backward()
    wanted = qkv(requires_grad=True)
    HostAttention()(*wanted, HEADS).square().mean().backward()
    for leaf, expected in zip(leaves, wanted, strict=True):
        assert cosine_similarity(leaf.grad.flatten(), expected.grad.flatten(), dim=0) > 0.99
    assert [entry.precision for entry in rig.entries()] == ["int8"]
    assert not rig.host.calls


def test_precisions_without_backward_leave_training_to_the_host_and_say_what_to_choose():
    rig = Rig(preset="custom", precision="fp4")
    leaves = qkv(requires_grad=True)
    rig(*leaves).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)
    [entry] = rig.entries()
    assert entry.backend == HOST
    assert "int8 trains" in entry.reason


def test_one_input_that_needs_a_gradient_is_enough():
    for position in range(3):
        rig = Rig(preset="custom", precision="fp4")
        tensors = qkv()
        tensors[position].requires_grad_()
        assert rig(*tensors).requires_grad


def test_a_preview_without_gradients_uses_the_inference_path():
    rig = Rig(preset="custom", precision="fp4")
    with torch.no_grad():
        rig(*qkv(requires_grad=True))
    assert [entry.precision for entry in rig.entries()] == ["fp4"]


@pytest.mark.parametrize("precision", ["int8", "fp4"])
def test_a_checkpoint_recomputes_with_the_same_decision_and_is_counted_once(precision):
    settings = {"preset": "custom", "precision": precision}
    plain, recomputing = qkv(requires_grad=True), qkv(requires_grad=True)
    Rig(**settings)(*plain).square().mean().backward()

    rig = Rig(**settings)
    out = checkpoint(rig, *recomputing, use_reentrant=False)
    rig.session.ledger.current.step = 7  # whatever changes between the passes
    out.square().mean().backward()
    assert len(rig.entries()) == 1
    assert len(rig.host.calls) == (2 if precision == "fp4" else 0)
    for a, b in zip(plain, recomputing, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_checkpoint_can_stop_its_recompute_early_through_the_override():
    """Such a stop is an exception that passes through us; it must not count as a failed kernel."""
    rig = Rig()
    leaves = qkv(requires_grad=True)

    def block(q, k, v):
        return rig(rig(q, k, v), k, v)

    checkpoint(block, *leaves, use_reentrant=False).sum().backward()
    assert not rig.session.broken
    assert not rig.host.calls
    assert len(rig.entries()) == 2


def test_layer_exceptions_are_not_guessed_while_training_a_model_of_unknown_layers():
    rig = Rig(preset="balanced", fp16_layers="call.0")
    rig(*qkv(requires_grad=True)).sum().backward()
    rig(*qkv())
    trained, sampled = rig.entries()
    assert trained.backend == HOST
    assert "training cannot tell" in trained.reason
    assert sampled.layer == "call.1"
    assert sampled.precision == "int8"


def test_the_cross_attention_policy_holds_in_training_whatever_the_order_of_calls():
    rig = Rig(preset="balanced", cross_attention="fp16")
    rig(*qkv(kv_tokens=8, requires_grad=True)).sum().backward()
    rig(*qkv(requires_grad=True)).sum().backward()
    assert [entry.precision for entry in rig.entries()] == ["fp16", "int8"]
