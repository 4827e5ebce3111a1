"""kernels.attention and its kin: arguments in every form, errors in words, torch.compile."""

import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sageattention3.demo.pack import ROOT
from sageattention3.kernels import (
    PRECISIONS,
    UnsupportedAttentionError,
    api,
    attention,
    attention_trainable,
    backends,
    capabilities,
    dispatch,
    explain,
    metrics,
    selftest,
)
from sageattention3.kernels.backend import Backend

QUANTISED = [p for p in PRECISIONS if p != "fp16"]
# Relative L1 on gaussian tensors: far above the noise of the format, far below any wiring fault.
BOUND = {"fp4": 0.35, "int8_fp4": 0.25, "int8": 0.03}


def tensors(b=2, hq=4, hk=4, nq=96, nk=96, d=64, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(b, h, n, d, generator=generator) for h, n in ((hq, nq), (hk, nk), (hk, nk))
    )
    return q.to(dtype), k.to(dtype), v.to(dtype)


def exact(q, k, v, mask=None, scale=None, causal=False):
    """FP64 attention; rows that may attend to nothing give zeros."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask.double()
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v


def agrees(out, reference, precision):
    errors = metrics.compare(out, reference)
    assert errors.finite
    assert errors.rel_l1 < BOUND[precision], errors


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_has_the_shape_and_dtype_of_q_and_is_token_major(precision, dtype):
    q, k, v = tensors(dtype=dtype, nq=70, nk=33)
    out = attention(q, k, v, precision=precision)
    assert out.shape == q.shape
    assert out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous()
    agrees(out, exact(q, k, v), precision)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 77), (512, 77), (77, 512), (130, 257), (3, 2)])
def test_query_and_key_lengths_may_differ(precision, nq, nk):
    q, k, v = tensors(nq=nq, nk=nk)
    agrees(attention(q, k, v, precision=precision), exact(q, k, v), precision)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 160, 256])
def test_padding_of_the_head_dim_never_changes_the_scale(precision, head_dim):
    q, k, v = tensors(d=head_dim)
    agrees(attention(q, k, v, precision=precision), exact(q, k, v), precision)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(("hq", "hk"), [(8, 1), (12, 3), (6, 2)])
def test_grouped_query_heads_read_their_own_key_head(precision, hq, hk):
    q, k, v = tensors(hq=hq, hk=hk)
    v = v * 0.1 + torch.arange(1.0, hk + 1)[None, :, None, None]  # a wrong head shows at once
    agrees(attention(q, k, v, precision=precision), exact(q, k, v), precision)


def mask_shapes(b, h, nq, nk):
    yield from ((nk,), (nq, nk), (1, nq, nk), (b, 1, 1, nk), (1, 1, 1, nk), (1, 1, nq, nk))
    yield from ((b, 1, nq, nk), (1, h, nq, nk), (b, h, nq, nk), (b, h, nq, 1), (b, 1, nq, 1))


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("form", range(11))
def test_every_broadcast_form_of_a_mask_is_honoured(precision, kind, form):
    b, h, nq, nk = 2, 4, 40, 48
    q, k, v = tensors(b, h, h, nq, nk)
    shape = list(mask_shapes(b, h, nq, nk))[form]
    generator = torch.Generator().manual_seed(form)
    mask = torch.rand(shape, generator=generator) < 0.6
    if kind == "additive":
        mask = torch.where(mask, torch.randn(shape, generator=generator), -torch.inf)
    agrees(attention(q, k, v, precision=precision, mask=mask), exact(q, k, v, mask), precision)


@pytest.mark.parametrize("precision", QUANTISED)
def test_a_row_that_may_attend_to_nothing_gives_zeros(precision):
    q, k, v = tensors()
    mask = torch.ones(96, 96, dtype=torch.bool)
    mask[5] = False
    out = attention(q, k, v, precision=precision, mask=mask)
    assert (out[:, :, 5] == 0).all()
    agrees(out, exact(q, k, v, mask), precision)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(("nq", "nk"), [(96, 96), (50, 96), (96, 50)])
def test_causal_is_aligned_as_in_torch(precision, nq, nk):
    q, k, v = tensors(nq=nq, nk=nk)
    torch.testing.assert_close(
        exact(q, k, v, causal=True),
        F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True),
    )
    out = attention(q, k, v, precision=precision, causal=True)
    agrees(out, exact(q, k, v, causal=True), precision)


@pytest.mark.parametrize("precision", QUANTISED)
def test_an_explicit_scale_is_used(precision):
    q, k, v = tensors()
    out = attention(q, k, v, precision=precision, scale=0.02)
    agrees(out, exact(q, k, v, scale=0.02), precision)


def strided_views(x):
    b, h, n, d = x.shape
    token_major = x.transpose(1, 2).contiguous().transpose(1, 2)
    packed = torch.empty(b, n, 3, h, d, dtype=x.dtype)
    packed[:, :, 1] = x.transpose(1, 2)
    every_second_token = torch.empty(b, h, 2 * n, d, dtype=x.dtype)
    every_second_token[:, :, ::2] = x
    return token_major, packed[:, :, 1].transpose(1, 2), every_second_token[:, :, ::2]


@pytest.mark.parametrize("precision", QUANTISED)
def test_strides_change_nothing_and_inputs_stay_as_they_were(precision):
    q, k, v = tensors()
    expected = attention(q, k, v, precision=precision)
    views = zip(*(strided_views(x) for x in (q, k, v)), strict=True)
    for view in views:
        before = [x.clone() for x in view]
        assert torch.equal(attention(*view, precision=precision), expected)
        assert all(torch.equal(x, y) for x, y in zip(view, before, strict=True))
    expanded = k[:, :1].expand_as(k)
    out = attention(q, expanded, v, precision=precision)
    assert torch.equal(out, attention(q, expanded.contiguous(), v, precision=precision))


def test_batch_times_heads_may_exceed_a_cuda_grid_dimension():
    q, k, v = tensors(b=8_200, hq=8, hk=8, nq=4, nk=5, d=16)
    agrees(attention(q, k, v, precision="int8"), exact(q, k, v), "int8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[0], k, v), r"\[B, H, N, D\]"),
        (lambda q, k, v: (q, k, v[:, :, :-1]), "one shape"),
        (lambda q, k, v: (q[..., :32], k, v), "head_dim"),
        (lambda q, k, v: (q, k[:, :3], v[:, :3]), "cannot share"),
        (lambda q, k, v: (q[:, :, :0], k, v), "empty"),
        (lambda q, k, v: (q.int(), k, v), "q is int32"),
        (lambda q, k, v: (q, k.to(torch.float8_e4m3fn), v), "k is float8_e4m3fn"),
        (lambda q, k, v: (q, k.to("meta"), v.to("meta")), "different devices"),
        (lambda q, k, v: (q, k, None), "v must be a dense tensor; got NoneType"),
        (lambda q, k, v: (q.tolist(), k, v), "q must be a dense tensor; got list"),
        (
            lambda q, k, v: (q, k.to_sparse(), v),
            "k must be a dense tensor; got a torch.sparse_coo one",
        ),
    ],
)
def test_malformed_tensors_are_named_in_the_error(change, words):
    bad = change(*tensors())
    with pytest.raises(UnsupportedAttentionError, match=words):
        attention(*bad, precision="int8")
    assert explain(*bad, precision="int8").backend is None


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.zeros(96, 95), "does not broadcast"),
        (torch.zeros(3, 1, 1, 96), "does not broadcast"),
        (torch.zeros(1, 1, 1, 1, 96), "does not broadcast"),
        (torch.zeros(96, 96, dtype=torch.int64), "mask is int64"),
        ([[True]], "mask must be a dense tensor; got list"),
    ],
)
def test_a_mask_that_does_not_fit_is_named_in_the_error(mask, words):
    with pytest.raises(UnsupportedAttentionError, match=words):
        attention(*tensors(), precision="fp4", mask=mask)


def test_an_unknown_precision_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedAttentionError, match="fp4, int8_fp4, int8, fp16"):
        attention(*tensors(), precision="fp5")


@pytest.mark.parametrize("precision", QUANTISED)
def test_inference_attention_refuses_to_cut_a_gradient(precision):
    q, k, v = tensors()
    k.requires_grad_()
    with pytest.raises(UnsupportedAttentionError, match="gradient"):
        attention(q, k, v, precision=precision)
    with torch.no_grad():
        attention(q, k, v, precision=precision)


def test_mixed_dtypes_answer_in_the_dtype_of_q():
    q, k, v = tensors()
    out = attention(q, k.half(), v.bfloat16(), precision="int8")
    assert out.dtype == torch.float32
    agrees(out, exact(q, k.half(), v.bfloat16()), "int8")


def test_fp32_inputs_beyond_the_range_of_fp16_stay_finite():
    q, k, v = tensors()
    agrees(attention(q, k, v * 7e4, precision="int8"), exact(q, k, v * 7e4), "int8")


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_reach_every_input_in_its_own_dtype(autocast):
    q, k, v = (t.bfloat16().requires_grad_() for t in tensors(hq=4, hk=2, nq=40, nk=60))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attention_trainable(q, k, v)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    ref = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact(*ref).backward(upstream.double())
    for mine, reference in zip((q, k, v), ref, strict=True):
        assert mine.grad.dtype == torch.bfloat16
        assert metrics.compare(mine.grad, reference.grad).cosine > 0.99


def test_a_mask_that_wants_a_gradient_is_refused():
    q, k, v = (t.requires_grad_() for t in tensors())
    bias = torch.zeros(96, 96, requires_grad=True)
    with pytest.raises(UnsupportedAttentionError, match="mask needs a gradient"):
        attention_trainable(q, k, v, mask=bias)


@pytest.mark.parametrize("precision", QUANTISED)
def test_the_operator_passes_torchs_own_checks(precision):
    q, k, v = tensors(nq=20, nk=24)
    args = (q, k, v, torch.zeros(1, 1, 1, 24), 0.1, False, precision, "reference")
    torch.library.opcheck(
        torch.ops.sageattention3.attention.default,
        args,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiled_equals_eager_in_one_graph_at_any_length():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    fn = torch.compile(
        lambda q, k, v: attention(q, k, v, precision="fp4") * 2,
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for n in (32, 48, 80):
        q, k, v = tensors(nq=n, nk=n)
        view = strided_views(q)[0]
        assert torch.equal(fn(view, k, v), attention(q, k, v, precision="fp4") * 2)
    assert counter.frame_count == 1


def test_capabilities_lists_every_precision_a_backend_offers_with_a_reason_where_unusable():
    rows = capabilities("cpu")
    assert {row.precision for row in rows if row.usable} == set(QUANTISED)
    assert all(row.usable == (not row.reason) for row in rows)
    assert {row.backend for row in rows if row.usable} == {"reference"}
    assert all("NVIDIA GPU" in row.reason for row in rows if row.native)
    assert all(not row.usable and row.reason for row in capabilities("meta"))


def test_a_second_copy_of_the_pack_is_refused_with_the_way_out():
    """Both in custom_nodes: torch's table of operators has room for one."""
    spec = importlib.util.spec_from_file_location(
        "second_copy", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    sys.modules["second_copy"] = importlib.util.module_from_spec(spec)
    try:
        with pytest.raises(ImportError, match="remove one of the two copies"):
            spec.loader.exec_module(sys.modules["second_copy"])
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "second_copy"]:
            del sys.modules[name]
    q = torch.randn(1, 1, 8, 64)
    assert torch.ops.sageattention3.attention(q, q, q, None, 1.0, False, "int8", "reference").equal(
        attention(q, q, q, precision="int8", scale=1.0)
    )


def test_a_decision_for_a_native_backend_is_remembered_with_all_it_depends_on(monkeypatch):
    """Each change must be decided anew; only the same call again is not."""
    asked = []

    def choose(request, *, backend, emulation):
        asked.append(request)
        return dispatch.Decision("native", True, "")

    monkeypatch.setattr(api, "_settled", {})
    monkeypatch.setattr(api, "choose", choose)
    q, k, v = tensors()
    mask = torch.ones(96, 96, dtype=torch.bool)
    calls = [
        ((q, k, v), {}),
        ((q[:, :, :50], k, v), {}),
        ((q, k[:, :, :50], v[:, :, :50]), {}),
        ((q.half(), k, v), {}),
        ((q, k.half(), v), {}),
        ((q, k, v.half()), {}),
        ((q, k, v), {"mask": mask}),
        ((q, k, v), {"mask": mask[:1]}),
        ((q, k, v), {"mask": mask.float()}),
        ((q, k, v), {"causal": True}),
        ((q, k, v), {"trainable": True}),
        ((q, k, v), {"emulation": False}),
        ((q, k, v), {"backend": "native"}),
        ((q, k, v), {"precision": "fp4"}),
        ((q.detach().requires_grad_(), k, v), {}),
    ]
    for _ in range(2):
        for given, options in calls:
            explain(*given, **{"precision": "int8", **options})
    assert len(asked) == len(calls)
    with torch.no_grad():
        explain(q.detach().requires_grad_(), k, v, precision="int8")
    assert len(asked) == len(calls), "without gradients it is the first call again"
    with pytest.raises(UnsupportedAttentionError, match="one shape"):
        attention(q, k, v[:, :, :50], precision="int8")


def test_calls_without_a_mask_go_the_way_that_their_backend_prepared_for_them(monkeypatch):
    went = []

    def forward(q, k, v, *, precision, mask, scale, causal):
        went.append("forward")
        return q

    def prepare(q, k, v, *, causal):
        def compute(q, k, v, *, mask, scale):
            went.append(f"prepared for {q.shape[2]}")
            return q

        went.append(f"prepare {q.shape[2]}")
        return None if causal else compute

    native = Backend("native", ("int8",), True, (), forward, prepare=prepare)
    monkeypatch.setattr(backends, "BACKENDS", (native,))
    monkeypatch.setattr(selftest, "fault", lambda *_: None)
    monkeypatch.setattr(api, "_settled", {})
    monkeypatch.setattr(api, "_prepared", {})
    q, k, v = tensors()
    short = q[:, :, :50]
    for given in ((q, k, v), (q, k, v), (short, k, v), (short.contiguous(), k, v)):
        attention(*given, precision="int8")
    assert went == [
        *("prepare 96", "prepared for 96", "prepared for 96"),
        *("prepare 50", "prepared for 50", "prepare 50", "prepared for 50"),
    ], "once for the same sizes and strides"
    went.clear()
    for options in ({"mask": torch.ones(96, 96)}, {"causal": True}, {"causal": True}):
        attention(q, k, v, precision="int8", **options)
    assert went == ["forward", "prepare 96", "forward", "forward"]
