"""The proof that a native backend gives before its first use, with backends that run on the CPU."""

import logging

import pytest
import torch
from sageattention3.kernels import (
    UnsupportedAttentionError,
    api,
    attention,
    backends,
    explain,
    selftest,
)
from sageattention3.kernels.backend import Backend
from sageattention3.kernels.jit.errors import JitError
from sageattention3.kernels.reference.backend import REFERENCE


def right(*tensors, **options):
    return REFERENCE.forward(*tensors, **options)


def ignores_mask(*tensors, mask, **options):
    return right(*tensors, mask=None, **options)


def ignores_causal(*tensors, causal, **options):
    return right(*tensors, causal=False, **options)


def ignores_scale(*tensors, scale, **options):
    return right(*tensors, scale=2 * scale, **options)


def swaps_heads(q, k, v, **options):
    return right(q, k.flip(1), v, **options)


def forgets_the_last_key(q, k, v, *, mask, **options):
    return right(
        q, k[:, :, :-1], v[:, :, :-1], mask=None if mask is None else mask[..., :-1], **options
    )


def loses_a_row(*tensors, **options):
    out = right(*tensors, **options)
    out[:, :, -1] = 0
    return out


def leaves_nan(*tensors, **options):
    out = right(*tensors, **options)
    out[0, 0, 3, 5] = torch.nan
    return out


def does_not_smooth(q, k, v, **options):
    return right(q, k, v, **options) + 0.01 * torch.sin(torch.arange(v.shape[-1]))


def races(*tensors, **options):
    return right(*tensors, **options) * (1 + 1e-3 * torch.rand(()))


def cannot_be_built(*tensors, **options):
    raise JitError("no NVRTC was found")


def crashes(*tensors, **options):
    raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def use(monkeypatch):
    """Makes ``forward`` a native int8 backend before the reference, not proven yet."""
    monkeypatch.setattr(selftest, "_verdicts", {})

    def register(forward):
        monkeypatch.setattr(api, "_settled", {})
        monkeypatch.setattr(api, "_prepared", {})
        native = Backend("native", ("int8",), True, (), forward)
        monkeypatch.setattr(backends, "BACKENDS", (native, REFERENCE))

    return register


def tensors(d=64, dtype=torch.float16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 2, 40, d, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("head_dim", [40, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_right_backend_proves_itself_for_every_kind_of_call(use, head_dim, dtype):
    use(right)
    decision = explain(*tensors(head_dim, dtype), precision="int8")
    assert decision == ("native", True, "")


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (ignores_mask, "masked call"),
        (ignores_causal, "causal call"),
        (ignores_scale, "plain call"),
        (swaps_heads, "plain call"),
        (forgets_the_last_key, "relative L1 error"),
        (loses_a_row, "relative L1 error"),
        (leaves_nan, "NaN or infinity"),
        (does_not_smooth, "relative L1 error"),
        (races, "answers differently each time"),
        (cannot_be_built, "could not be built: no NVRTC was found"),
        (crashes, "illegal memory access"),
    ],
)
def test_a_wrong_backend_is_left_out_with_one_message(use, caplog, forward, words):
    use(forward)
    with caplog.at_level(logging.ERROR, "sageattention3"):
        decisions = [explain(*tensors(), precision="int8") for _ in range(3)]
    assert {decision.backend for decision in decisions} == {"reference"}
    assert words in decisions[0].reason
    [record] = caplog.records
    assert words in record.getMessage()
    with pytest.raises(UnsupportedAttentionError, match="native"):
        attention(*tensors(), precision="int8", backend="native")


def trains_without_v(q, k, v, **options):
    return REFERENCE.train(q, k, v.detach() + 0 * v, **options)


def loses_half_of_dq(q, k, v, **options):
    return REFERENCE.train(q.detach() / 2 + q / 2, k, v, **options)


def lets_the_mask_slip(q, k, v, *, mask, **options):
    return REFERENCE.train(q, k, v, mask=None, **options)


def races_in_training(*tensors, **options):
    return REFERENCE.train(*tensors, **options) * (1 + 0.1 * torch.rand(()))


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (REFERENCE.train, None),
        (trains_without_v, "in its dV"),
        (loses_half_of_dq, "in its dQ"),
        (lets_the_mask_slip, "training, int8, head_dim 64, bfloat16"),
        (races_in_training, "its output is different each time"),
    ],
)
def test_a_backward_pass_has_a_proof_of_its_own(monkeypatch, train, words):
    monkeypatch.setattr(selftest, "_verdicts", {})
    monkeypatch.setattr(api, "_settled", {})
    native = Backend("native", ("int8",), True, (), right, train=train)
    monkeypatch.setattr(backends, "BACKENDS", (native, REFERENCE))
    given = tensors(dtype=torch.bfloat16)
    assert explain(*given, precision="int8") == ("native", True, "")
    decision = explain(*given, precision="int8", trainable=True)
    if words is None:
        assert decision == ("native", True, "")
    else:
        assert decision.backend == "reference"
        assert words in decision.reason


def test_a_backend_with_a_proof_of_its_own_is_used_only_if_that_holds(monkeypatch):
    monkeypatch.setattr(selftest, "_verdicts", {})
    monkeypatch.setattr(api, "_settled", {})
    asked = []

    def proof(device, head_dim, dtype):
        asked.append((device.type, head_dim, dtype))
        return "its products are wrong" if head_dim == 64 else None

    native = Backend("native", ("int8",), True, (), right, proof=proof)
    monkeypatch.setattr(backends, "BACKENDS", (native, REFERENCE))
    refused = explain(*tensors(64), precision="int8")
    assert refused.backend == "reference"
    assert refused.reason == "native failed its self-test: its products are wrong"
    assert explain(*tensors(128), precision="int8").backend == "native"
    assert asked == [("cpu", 64, torch.float16), ("cpu", 128, torch.float16)]


def test_a_proof_is_given_once_per_kind_of_call_and_touches_nothing_outside(use):
    calls = []

    def counted(*tensors, **options):
        calls.append(tensors[0].shape)
        return right(*tensors, **options)

    use(counted)
    state, arguments = torch.random.get_rng_state(), tensors()
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        explain(*arguments, precision="int8")
    assert torch.equal(torch.random.get_rng_state(), state)
    proof = len(calls)
    assert proof > 0
    explain(*tensors(), precision="int8")
    assert len(calls) == proof
    explain(*tensors(d=128), precision="int8")
    assert len(calls) == 2 * proof


def test_running_out_of_memory_is_no_verdict(use):
    def starving(*tensors, **options):
        raise torch.OutOfMemoryError("no room")

    use(starving)
    with pytest.raises(torch.OutOfMemoryError):
        explain(*tensors(), precision="int8")
    use(right)
    assert explain(*tensors(), precision="int8").backend == "native"


def test_a_proof_within_torch_compile_stays_out_of_the_graph(use):
    use(right)
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, precision="int8"),
        backend=keep,
        fullgraph=True,
        dynamic=True,
    )
    q, k, v = tensors()
    assert torch.equal(compiled(q, k, v), attention(q, k, v, precision="int8", backend="native"))
    [graph] = graphs
    made = [node for node in graph.graph.nodes if "example_value" in node.meta]
    tensor_ops = [
        str(node.target)
        for node in made
        if node.op == "call_function" and isinstance(node.meta["example_value"], torch.Tensor)
    ]
    assert tensor_ops == ["sageattention3.attention.default"]
