"""Every argument form of the host's attention function becomes the same [B, H, N, D] tensors."""

import pytest
import torch
from sageattention3.nodes.engine.call import AttentionCall, Refusal, read_call

# As many tokens as heads, and a batch: a mix-up of axes keeps every shape.
B, H, D = 2, 6, 8
N = H


def tensors(kv_heads=H, kv_len=N):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, N, D), (B, kv_heads, kv_len, D), (B, kv_heads, kv_len, D))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def packed(t):
    """[B, H, N, D] -> (B, N, H*D)"""
    return t.transpose(1, 2).flatten(2)


def strided(t):
    """The same values, last dimension contiguous, the others not."""
    wide = torch.zeros(*t.shape[:-2], 3 * t.shape[-2], t.shape[-1])
    view = wide[..., ::3, :]
    view.copy_(t)
    return view


@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("keywords", [False, True])
@pytest.mark.parametrize("layout", [lambda t: t, strided])
def test_each_layout_flag_is_understood_when_tokens_equal_heads(
    skip_reshape, skip_output_reshape, keywords, layout
):
    q, k, v = tensors()
    given = [layout(t if skip_reshape else packed(t)) for t in (q, k, v)]
    flags = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    call = (
        read_call(*given, heads=H, mask=None, attn_precision=None, **flags)
        if keywords
        else read_call(*given, H, None, None, *flags.values())
    )

    for read, wanted in zip(call[:3], (q, k, v), strict=True):
        torch.testing.assert_close(read, wanted, rtol=0, atol=0)
    assert (call.q_len, call.kv_len) == (N, N)
    out = call.finish(v.transpose(1, 2).contiguous().transpose(1, 2))
    torch.testing.assert_close(out, v if skip_output_reshape else packed(v), rtol=0, atol=0)


def test_inputs_are_views_and_the_packed_output_costs_no_copy():
    q, k, v = (packed(t) for t in tensors())
    call = read_call(q, k, v, H)
    assert call.q.data_ptr() == q.data_ptr()
    token_major = torch.zeros(B, N, H, D).transpose(1, 2)
    assert call.finish(token_major).data_ptr() == token_major.data_ptr()
    assert call.finish(token_major).is_contiguous()


def test_a_4d_value_beside_a_3d_query_is_token_major_as_in_sd3():
    q, k, v = tensors()
    call = read_call(packed(q), packed(k), v.transpose(1, 2), heads=H)
    torch.testing.assert_close(call.v, v, rtol=0, atol=0)


def test_keys_and_values_of_other_length_keep_their_own_length():
    q, k, v = tensors(kv_len=11)
    for call in (
        read_call(packed(q), packed(k), packed(v), H),
        read_call(packed(q), k.transpose(1, 2), v.transpose(1, 2), H),
        read_call(q, k, v, H, skip_reshape=True),
    ):
        assert (call.q_len, call.kv_len) == (N, 11)
        torch.testing.assert_close(call.k, k, rtol=0, atol=0)


@pytest.mark.parametrize("skip_reshape", [False, True])
def test_grouped_keys_keep_their_own_heads(skip_reshape):
    q, k, v = tensors(kv_heads=2)
    given = (q, k, v) if skip_reshape else (packed(q), packed(k), packed(v))
    call = read_call(*given, H, skip_reshape=skip_reshape, enable_gqa=True)
    torch.testing.assert_close(call.k, k, rtol=0, atol=0)
    refusal = read_call(*given, H, skip_reshape=skip_reshape)
    assert isinstance(refusal, Refusal)
    assert "2 key heads for 6 query heads" in refusal.reason


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((N, 5), (1, 1, N, 5)),
        ((1, 5), (1, 1, 1, 5)),
        ((B, N, 5), (B, 1, N, 5)),
        ((1, 1, 5), (1, 1, 1, 5)),
        ((B, 1, 1, 5), (B, 1, 1, 5)),
        ((B, H, N, 5), (B, H, N, 5)),
    ],
)
@pytest.mark.parametrize("positional", [False, True])
def test_masks_of_every_rank_line_up_from_the_right(shape, wanted, positional):
    q, k, v = tensors(kv_len=5)
    mask = torch.randn(shape)
    given = ((mask,), {}) if positional else ((), {"mask": mask})
    call = read_call(q, k, v, H, *given[0], skip_reshape=True, **given[1])
    assert call.mask.shape == wanted
    assert torch.equal(call.mask.flatten(), mask.flatten())


def test_a_2d_mask_with_a_row_per_image_is_left_to_the_host():
    q, k, v = tensors(kv_len=5)
    refusal = read_call(q, k, v, H, torch.ones(B, 5, dtype=torch.bool), skip_reshape=True)
    assert isinstance(refusal, Refusal)
    assert "mask" in refusal.reason


class GuideAttentionMask:
    pass


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"low_precision_attention": False}, "full precision"),
        ({"attn_precision": torch.float32}, "float32"),
        ({"mask": GuideAttentionMask()}, "GuideAttentionMask"),
        ({"sinks": torch.zeros(H)}, "sinks"),
    ],
)
def test_what_kernels_cannot_honour_is_refused_in_words(arguments, reason):
    refusal = read_call(*tensors(kv_len=5), H, skip_reshape=True, **arguments)
    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason
    assert (refusal.q_len, refusal.kv_len) == (N, 5)


def test_unknown_flags_are_named_and_do_not_stop_the_call():
    call = read_call(*tensors(), H, skip_reshape=True, future_flag=1, other_flag=False)
    assert isinstance(call, AttentionCall)
    assert call.ignored == ("future_flag",)


def test_a_scale_is_passed_on():
    assert read_call(*tensors(), H, skip_reshape=True, scale=0.25).scale == 0.25
    assert read_call(*tensors(), H, skip_reshape=True).scale is None


@pytest.mark.parametrize(
    ("shapes", "skip_reshape"),
    [
        (((B, N, H * D + 1), (B, N, H * D), (B, N, H * D)), False),
        (((B, N, H * D), (B, N, H * D + 1), (B, N, H * D + 1)), False),
        (((B, N, H * D), (B, N, H * D), (B, N, H, D + 1)), False),
        (((B, N, H * D), (B, N, H * D), (B, N, H * D)), True),
        (((B, H + 1, N, D), (B, H + 1, N, D), (B, H + 1, N, D)), True),
    ],
)
def test_shapes_that_contradict_the_flags_are_refused(shapes, skip_reshape):
    given = [torch.zeros(shape) for shape in shapes]
    assert isinstance(read_call(*given, H, skip_reshape=skip_reshape), Refusal)
