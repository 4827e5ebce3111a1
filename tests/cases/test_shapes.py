"""Shapes that kernels reject or mistake: head sizes, lengths, grouped heads, layouts, batches."""

import logging
from dataclasses import replace

import pytest
import torch
from sageattention3.kernels import UnsupportedAttentionError, attention, explain
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import SCHEMES

from .calls import (
    QUANTISED,
    Patched,
    assert_accurate,
    core_attention,
    exact,
    overridable,
    packed,
    tensors,
)

each_precision = pytest.mark.parametrize("precision", QUANTISED)


# ---------------------------------------------------------------------------------- QA-15: head_dim
@each_precision
@pytest.mark.parametrize("head_dim", [20, 40, 72, 80, 96, 160, 256])
def test_a_head_dim_that_needs_padding_is_computed_as_it_is(precision, head_dim):
    """QA-15: SD1.5's 40, 80 and 160 stopped runs; a scale taken from the padded size is off too."""
    q, k, v = tensors(d=head_dim, nk=192)
    assert_accurate(attention(q, k, v, precision=precision), exact(q, k, v), precision)


@pytest.mark.parametrize("head_dim", [20, 40, 72, 80])
def test_channels_of_zeros_change_nothing_in_fp4(head_dim, monkeypatch):
    """QA-15, metamorphic: a scale from the padded size hides in the noise of FP4 (relL1 .22).

    Without rotation, which is another one for another number of channels.
    """
    monkeypatch.setitem(SCHEMES, "fp4", replace(SCHEMES["fp4"], rotate=False))
    q, k, v = tensors(d=head_dim, nk=192)
    wide = [torch.nn.functional.pad(x, (0, 128 - head_dim)) for x in (q, k, v)]
    out = attention(q, k, v, precision="fp4")
    padded = attention(*wide, precision="fp4", scale=head_dim**-0.5)
    assert (padded[..., head_dim:] == 0).all()
    assert compare(padded[..., :head_dim], out).rel_l1 < 1e-3


@pytest.mark.host
@pytest.mark.parametrize("head_dim", [264, 384, 512])
def test_a_head_dim_beyond_the_kernels_is_the_hosts_with_one_line_in_the_log(head_dim, caplog):
    """QA-15: one error line per call made logs unreadable."""
    patched = Patched.everywhere("int8")
    call = (*tensors(d=head_dim, nq=40), 2)
    expected = core_attention()(*call, skip_reshape=True)
    with caplog.at_level(logging.INFO, logger="sageattention3"):
        for _ in range(5):
            assert torch.equal(patched(*call, skip_reshape=True), expected)
        assert not caplog.records
        patched.session.end_run()
    [record] = caplog.records
    assert "All 5 attention calls stayed with the host" in record.getMessage()
    assert record.getMessage().count("a head_dim of at most 256") == 1


# ---------------------------------------------------------------- QA-17: lengths of q and k differ
LENGTHS = [(1, 77), (4096, 77), (32_760, 512), (77, 4096), (1, 1)]
# Wan's 32,760 x 512 takes the emulation of FP4 many seconds; its length is no special case there.
COMPUTED = [(p, *n) for p in QUANTISED for n in LENGTHS if p == "int8" or n != (32_760, 512)]


@pytest.mark.host
@pytest.mark.parametrize(("precision", "q_len", "kv_len"), COMPUTED)
def test_cross_attention_is_right_at_any_pair_of_lengths(precision, q_len, kv_len):
    """QA-17: kernels that assume equal lengths, or at least 128 queries."""
    q, k, v = tensors(hq=1, nq=q_len, nk=kv_len, d=32)
    patched = Patched.everywhere(precision)
    out = patched(packed(q), packed(k), packed(v), 1)
    assert patched.precisions == [precision]
    assert out.shape == (1, q_len, 32)
    assert_accurate(out, packed(exact(q, k, v)), precision)


@pytest.mark.host
@pytest.mark.parametrize("preset", ["balanced", "quality", "speed"])
def test_every_preset_keeps_cross_attention_with_the_host(preset):
    """QA-17: text keys are few, and their errors reach every image token."""
    patched = Patched(preset=preset)
    for q_len, kv_len in LENGTHS:
        call = (*(packed(x) for x in tensors(hq=1, nq=q_len, nk=kv_len, d=32)), 1)
        assert torch.equal(patched(*call), core_attention()(*call))
    assert patched.reasons == {
        "cross-attention kept in fp16",
        "fewer than min_tokens=1024 keys",  # 1 x 1 looks like self-attention
    }


@each_precision
@pytest.mark.parametrize("q_len", [1, 77, 130])
def test_a_single_key_gives_every_query_its_value(precision, q_len):
    """QA-17: with one key softmax is 1 whatever its score; no quantiser may touch that."""
    q, k, v = tensors(b=2, nq=q_len, nk=1)
    torch.testing.assert_close(attention(q, k, v, precision=precision), v.expand_as(q))


# ---------------------------------------------------------------- QA-18: grouped heads
HEADS = [(48, 12), (32, 8), (8, 1)]


def grouped(hq, hk, **kwargs):
    return tensors(b=2, hq=hq, hk=hk, nq=32, nk=48, d=32, **kwargs)


def in_layout(call, split):
    """Arguments of the host's function for q, k, v [B, H, N, D] and the keywords they need."""
    given = call if split else [packed(x) for x in call]
    return (*given, call[0].shape[1]), {"enable_gqa": True, "skip_reshape": split}


@pytest.mark.host
@each_precision
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("hq", "hk"), HEADS)
def test_each_query_head_reads_the_values_of_its_own_group(precision, split, hq, hk):
    """QA-18: values that name their batch item and key head make a wrong mapping visible."""
    q, k, v = grouped(hq, hk)
    names = torch.arange(1.0, 2 * hk + 1).view(2, hk, 1, 1)
    v = names.expand(v.shape).half()
    args, keywords = in_layout((q, k, v), split)
    patched = Patched.everywhere(precision)
    out = patched(*args, **keywords)
    assert patched.precisions == [precision]
    expected = names.repeat_interleave(hq // hk, 1).expand(q.shape)
    torch.testing.assert_close(out.float(), packed(expected), rtol=1e-3, atol=0)


@pytest.mark.host
@each_precision
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("hq", "hk"), HEADS)
def test_each_query_head_scores_the_keys_of_its_own_group(precision, split, hq, hk):
    """QA-18: equals attention over repeated key and value heads (which ``exact`` makes)."""
    q, k, v = grouped(hq, hk)
    args, keywords = in_layout((q, k, v), split)
    out = Patched.everywhere(precision)(*args, **keywords)
    assert_accurate(out, packed(exact(q, k, v)), precision)


@each_precision
def test_heads_that_do_not_divide_are_refused_by_the_kernels(precision):
    """QA-18: 48 query heads have no agreed mapping to 13 key heads."""
    with pytest.raises(UnsupportedAttentionError, match="48 query heads cannot share 13 key heads"):
        attention(*grouped(48, 13), precision=precision)


@pytest.mark.host
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    ("hk", "flag", "reason"),
    [
        (13, True, "48 query heads cannot share 13 key heads: not a multiple"),
        (12, False, "12 key heads for 48 query heads, without the flag for it"),
    ],
)
def test_heads_that_do_not_divide_or_were_not_announced_are_the_hosts(split, hk, flag, reason):
    """QA-18: the host decides, with the model's very arguments."""
    seen = []

    @overridable
    def host_attention(*args, **kwargs):
        seen.append(args)
        return "the host's answer"

    (*given, heads), keywords = in_layout(grouped(48, hk), split)
    patched = Patched.everywhere("int8", host_attention=host_attention)
    assert patched(*given, heads, **{**keywords, "enable_gqa": flag}) == "the host's answer"
    assert all(a is b for a, b in zip(seen[0], (*given, heads), strict=True))
    assert patched.reasons == {reason}


# ------------------------------------------------------------------------------ QA-19: layout flags
S = 24  # tokens, heads and head_dim alike: whatever mixes axes up keeps every shape


@pytest.mark.host
@each_precision
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("skip_reshape", [False, True])
def test_each_combination_of_layout_flags_equals_the_hosts_own(
    precision, skip_reshape, skip_output_reshape
):
    """QA-19: head counts read from the wrong axis, results in another layout."""
    q, k, v = tensors(b=2, hq=S, nq=S, d=S)
    call = (*((q, k, v) if skip_reshape else (packed(x) for x in (q, k, v))), S)
    flags = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    patched = Patched.everywhere(precision)
    out, expected = patched(*call, **flags), core_attention()(*call, **flags)
    assert patched.precisions == [precision]
    assert out.dtype == expected.dtype
    assert_accurate(out, expected, precision)
    if skip_output_reshape:
        assert out.transpose(1, 2).view(2, S, S * S).shape == (2, S, S * S)
    else:
        assert out.view(2, S, S, S).shape == (2, S, S, S)
        assert out.view(2 * S, S * S).shape == (2 * S, S * S)


@pytest.mark.host
@each_precision
@pytest.mark.parametrize("skip_reshape", [False, True])
def test_inputs_that_are_views_into_a_joint_tensor_equal_the_hosts_own(precision, skip_reshape):
    """QA-19: q, k, v of one qkv projection, and SD3's 4-D v beside 3-D q and k."""
    q, k, v = tensors(b=2, hq=S, nq=S, d=S)
    joint = torch.stack([packed(x) for x in (q, k, v)], 2).flatten(2)  # (B, N, 3*H*D)
    q, k, v = joint.chunk(3, -1)
    if skip_reshape:
        q, k, v = (x.unflatten(2, (S, S)).transpose(1, 2) for x in (q, k, v))
    else:
        v = v.unflatten(2, (S, S))
    assert not any(x.is_contiguous() for x in (q, k, v))
    patched = Patched.everywhere(precision)
    out = patched(q, k, v, S, skip_reshape=skip_reshape)
    expected = core_attention()(q, k, v, S, skip_reshape=skip_reshape)
    assert patched.precisions == [precision]
    assert out.is_contiguous()
    assert_accurate(out, expected, precision)


# ---------------------------------------------------------------- QA-20: huge batches
BATCH = 70_000  # above 65,535, the limit of a CUDA grid's second and third dimension


def repeated(times, **kwargs):
    """A small call, and one of ``times`` as many batch items that repeats it."""
    small = tensors(**kwargs)
    return small, [x.repeat(times, 1, 1, 1) for x in small]


def test_a_batch_beyond_a_cuda_grid_is_right_in_every_item():
    """QA-20: launches fail beyond the grid's limits, and who ignores that returns garbage."""
    # The reported [70000, 8, 16, 64] takes gigabytes; the batch is what counts.
    small, call = repeated(BATCH // 100, b=100, hq=1, nq=3, d=8)
    expected = attention(*small, precision="int8")
    assert_accurate(expected, exact(*small), "int8")
    out = attention(*call, precision="int8").unflatten(0, (-1, 100))
    torch.testing.assert_close(out, expected.expand_as(out), rtol=1e-2, atol=1e-3)


@each_precision
def test_dispatch_answers_for_the_reported_batch_without_touching_data(precision):
    """QA-20: a decision costs nothing, so a backend with a limit can be passed over."""
    one = torch.zeros(1, dtype=torch.float16).expand(BATCH, 8, 16, 64)
    assert explain(one, one, one, precision=precision).backend is not None


@pytest.mark.host
def test_temporal_attention_over_few_frames_stays_with_the_host():
    """QA-20: a huge batch of 16-frame sequences is short attention by default."""
    call = (*(packed(x) for x in repeated(BATCH // 100, b=100, hq=1, nq=16, d=8)[1]), 1)
    patched = Patched()
    assert torch.equal(patched(*call), core_attention()(*call))
    assert patched.reasons == {"fewer than min_tokens=1024 keys"}
