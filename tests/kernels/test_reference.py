"""The tiled forward pass: exact where nothing is quantised, and in all that quantising keeps."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import SCHEMES, Scheme, exact_attention, reference_attention

# Every smoothing and the rotation, in FP32: must equal plain attention to rounding.
UNQUANTISED = Scheme(qk="exact", pv="exact", smooth_v=True, rotate=True)
BOUND = {"fp4": 0.35, "int8_fp4": 0.25, "int8": 0.03}  # relative L1 on gaussian tensors
BIG = torch.finfo(torch.float32).max

each_precision = pytest.mark.parametrize("precision", SCHEMES)


def tensors(b=2, hq=4, hk=4, nq=96, nk=96, d=64, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(b, h, n, d, generator=generator) for h, n in ((hq, nq), (hk, nk), (hk, nk))
    )
    return q.to(dtype), k.to(dtype), v.to(dtype)


def test_the_fp64_oracle_is_torchs_attention():
    q, k, v = (x.double() for x in tensors(hq=6, hk=2, nq=700, nk=90, d=16))
    mask = torch.rand(2, 1, 700, 90) < 0.5
    mask[:, :, :, 0] = True
    for arguments in ({}, {"mask": mask}, {"causal": True}, {"scale": 0.3}):
        expected = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=arguments.get("mask"),
            is_causal=arguments.get("causal", False),
            scale=arguments.get("scale"),
            enable_gqa=True,
        )
        torch.testing.assert_close(exact_attention(q, k, v, **arguments), expected)


# --------------------------------------------------------------------- wiring, with no quantisation
@st.composite
def calls(draw):
    hk, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    nq, nk = draw(st.integers(1, 300)), draw(st.integers(1, 200))
    b, hq = draw(st.integers(1, 2)), hk * group
    d = draw(st.sampled_from([8, 40, 64, 72, 80, 96, 160]))
    q, k, v = tensors(b, hq, hk, nq, nk, d, seed=draw(st.integers(0, 9)))
    v = v + torch.arange(hk)[:, None, None]  # a wrong head shows at once
    mask = None
    kind = draw(st.sampled_from(["none", "bool", "additive", "finite"]))
    if kind != "none":
        shape = [draw(st.sampled_from([1, size])) for size in (b, hq, nq, nk)]
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(nq)) < 0.6
        if kind != "bool":
            hidden = -torch.inf if kind == "additive" else -BIG
            mask = torch.where(mask, torch.randn(shape), hidden)
    return q, k, v, mask, draw(st.booleans())


@settings(max_examples=120)
@given(calls())
def test_every_call_without_quantisation_is_plain_attention(call):
    q, k, v, mask, causal = call
    out = reference_attention(q, k, v, scheme=UNQUANTISED, mask=mask, causal=causal)
    if mask is not None and mask.dtype != torch.bool:
        # FP32 absorbs any score into -finfo.max, so a row of them is uniform; FP64 would not.
        mask = mask.double().masked_fill(mask == -BIG, -1e300)
    expected = exact_attention(q, k, v, mask=mask, causal=causal)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_log_sum_exp_is_that_of_the_unsmoothed_scores(causal):
    q, k, v = tensors(hq=4, hk=2, nq=150, nk=100)
    k = k + 3.0
    _, lse = reference_attention(q, k, v, scheme=UNQUANTISED, causal=causal, return_lse=True)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 8
    if causal:
        scores = scores.masked_fill(~torch.ones(150, 100, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)
    _, lse = reference_attention(q, k, v, scheme=SCHEMES["fp4"], causal=causal, return_lse=True)
    assert (lse - scores.logsumexp(-1)).abs().mean() < 0.1


# ------------------------------------------------------------------------------------- masked keys
def masks_that_hide(keys, nq, nk):
    seen = torch.ones(nq, nk, dtype=torch.bool)
    seen[:, keys] = False
    yield seen[None, None]
    yield seen[:1][None, None]
    for low in (-torch.inf, -BIG, torch.finfo(torch.float16).min):
        yield torch.zeros(1, 1, nq, nk).masked_fill(~seen, low)
    yield torch.zeros(1, 1, 1, nk, dtype=torch.float64).masked_fill(
        ~seen[:1], torch.finfo(torch.float64).min
    )


@each_precision
@pytest.mark.parametrize("form", range(6))
@pytest.mark.parametrize("causal", [False, True])
def test_masked_keys_do_not_leak_into_the_output(precision, form, causal):
    q, k, v = tensors(hq=4, hk=2, nq=150, nk=150)
    keys = torch.arange(150) % 7 == 3
    mask = list(masks_that_hide(keys, 150, 150))[form]
    clean = reference_attention(q, k, v, scheme=SCHEMES[precision], mask=mask, causal=causal)
    k2, v2 = k.clone(), v.clone()
    k2[:, :, keys], v2[:, :, keys] = 1e4, torch.nan
    dirty = reference_attention(q, k2, v2, scheme=SCHEMES[precision], mask=mask, causal=causal)
    assert torch.equal(clean, dirty)
    expected = exact_attention(q, k, v, mask=mask, causal=causal)
    assert compare(clean, expected).rel_l1 < BOUND[precision]


@each_precision
def test_keys_after_the_last_causal_query_do_not_leak(precision):
    q, k, v = tensors(nq=50, nk=90)
    clean = reference_attention(q, k, v, scheme=SCHEMES[precision], causal=True)
    k[:, :, 50:], v[:, :, 50:] = 1e4, 1e4
    assert torch.equal(clean, reference_attention(q, k, v, scheme=SCHEMES[precision], causal=True))


@each_precision
def test_a_key_hidden_from_one_head_still_counts_for_the_other_heads_of_its_group(precision):
    q, k, v = tensors(b=1, hq=2, hk=1)
    mask = torch.ones(1, 2, 1, 96, dtype=torch.bool)
    mask[:, 0, :, 5] = False
    k[:, :, 5] *= 8
    out = reference_attention(q, k, v, scheme=SCHEMES[precision], mask=mask)
    assert compare(out, exact_attention(q, k, v, mask=mask)).rel_l1 < BOUND[precision]


@each_precision
@pytest.mark.parametrize("low", [False, -torch.inf])
def test_a_row_that_sees_nothing_is_zero_even_with_v_smoothing(precision, low):
    q, k, v = tensors()
    v = v + 5
    mask = torch.ones(1, 1, 96, 96, dtype=torch.bool)
    mask[..., 7, :] = False
    if low is not False:
        mask = torch.zeros(1, 1, 96, 96).masked_fill(~mask, low)
    out, lse = reference_attention(q, k, v, scheme=SCHEMES[precision], mask=mask, return_lse=True)
    assert (out[:, :, 7] == 0).all()
    assert (lse[:, :, 7] == -torch.inf).all()
    assert compare(out, exact_attention(q, k, v, mask=mask)).rel_l1 < BOUND[precision]


@each_precision
def test_a_call_in_which_nothing_is_seen_is_all_zero(precision):
    q, k, v = tensors()
    mask = torch.zeros(1, 1, 1, 96, dtype=torch.bool)
    assert (reference_attention(q, k, v, scheme=SCHEMES[precision], mask=mask) == 0).all()


def test_an_expanded_mask_costs_no_more_memory_than_its_own_values():
    q, k, v = tensors(b=1, nq=64, nk=64)
    small = torch.zeros(1, 1, 1, 64)
    expanded = small.expand(1, 4, 64, 64)
    from sageattention3.kernels.reference.visibility import without_expanded_dims

    assert without_expanded_dims(expanded).shape == small.shape
    out = [reference_attention(q, k, v, scheme=SCHEMES["int8"], mask=m) for m in (small, expanded)]
    assert torch.equal(*out)


# -------------------------------------------------------------------------- shapes, strides, slices
@each_precision
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_padding_of_ragged_lengths_takes_no_part(precision, n):
    q, k, v = tensors(nq=n, nk=n)
    k = k + 20  # a mean over padded tokens would leave most of it
    out = reference_attention(q, k, v, scheme=SCHEMES[precision])
    assert compare(out, exact_attention(q, k, v)).rel_l1 < BOUND[precision]


@each_precision
@pytest.mark.parametrize("d", [40, 72])
def test_padding_of_the_head_dim_changes_nothing(precision, d):
    q, k, v = tensors(d=d)
    wide = [F.pad(x, (0, -d % 16)) for x in (q, k, v)]
    scheme = replace(SCHEMES[precision], rotate=False)  # rotation mixes the padding in
    out = reference_attention(q, k, v, scheme=scheme)
    padded = reference_attention(*wide, scheme=scheme, scale=d**-0.5)[..., :d]
    torch.testing.assert_close(out, padded, rtol=1e-5, atol=1e-6)


@each_precision
def test_a_result_does_not_depend_on_what_else_is_in_the_batch(precision):
    q, k, v = tensors(b=3, hq=6, hk=3, nq=140, nk=90)
    whole = reference_attention(q, k, v, scheme=SCHEMES[precision])
    for b in range(3):
        for h in range(3):
            one = (
                q[b : b + 1, 2 * h : 2 * h + 2],
                k[b : b + 1, h : h + 1],
                v[b : b + 1, h : h + 1],
            )
            out = reference_attention(*one, scheme=SCHEMES[precision])
            torch.testing.assert_close(
                out, whole[b : b + 1, 2 * h : 2 * h + 2], rtol=1e-4, atol=1e-5
            )


@each_precision
@pytest.mark.parametrize("causal", [False, True])
def test_slices_and_row_tiles_change_nothing(precision, causal, monkeypatch):
    from sageattention3.kernels.reference import tiles

    q, k, v = tensors(b=2, hq=4, hk=2, nq=300, nk=200)
    mask = torch.rand(2, 4, 300, 200, generator=torch.Generator().manual_seed(1)) < 0.7
    arguments = {"scheme": SCHEMES[precision], "mask": mask, "causal": causal}
    whole = reference_attention(q, k, v, **arguments)
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 1)
    torch.testing.assert_close(
        reference_attention(q, k, v, **arguments), whole, rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_batches_beyond_a_cuda_grid_stay_within_bounded_memory():
    import resource

    q, k, v = (torch.randn(70_000, 2, 5, 8) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = reference_attention(q, k, v, scheme=SCHEMES["fp4"])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 2 * out.nbytes + 500e6
    some = torch.randint(0, 70_000, (50,))
    expected = exact_attention(q[some], k[some], v[some])
    assert compare(out[some], expected).rel_l1 < BOUND["fp4"]


# ------------------------------------------------------------------------------- degenerate values
@each_precision
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zero_and_constant_operands_give_exact_answers(precision, dtype):
    scheme = SCHEMES[precision]
    q, k, v = tensors(dtype=dtype)
    zero = torch.zeros_like(q)
    assert (reference_attention(zero, zero, zero, scheme=scheme) == 0).all()
    silent = v.clone()
    silent[..., 7] = 0
    assert (reference_attention(q, k, silent, scheme=scheme)[..., 7] == 0).all()
    mean = v.float().mean(2, keepdim=True).expand_as(v)
    for uniform in (
        reference_attention(q, k[:, :, :1].expand_as(k), v, scheme=scheme),
        reference_attention(zero, k, v, scheme=scheme),
    ):
        assert (uniform.float() - mean).abs().max() < 0.03
    v[:, :, 3] = 0.001
    assert torch.isfinite(reference_attention(q, k, v, scheme=scheme)).all()


@each_precision
def test_values_near_the_end_of_fp16_stay_finite(precision):
    q, k, v = (x.clamp(-1, 1) * 6.5e4 for x in tensors())
    out = reference_attention(q.half(), k.half(), v.half(), scheme=SCHEMES[precision])
    assert torch.isfinite(out).all()
    same_sign = reference_attention(
        torch.zeros_like(q).half(),
        k.half(),
        torch.full_like(v, 65504).half(),
        scheme=SCHEMES[precision],
    )
    assert compare(same_sign, torch.full_like(v, 65504)).rel_l1 < 0.05


@each_precision
def test_bfloat16_values_near_the_end_of_fp32_stay_finite(precision):
    q, k, v = tensors(dtype=torch.bfloat16)
    v = v.clamp(-1, 1) * 1.5e38
    out = reference_attention(q, k, v, scheme=SCHEMES[precision])
    assert torch.isfinite(out).all()
    assert compare(out.double() / 1e38, exact_attention(q, k, v) / 1e38).rel_l1 < BOUND[precision]


@each_precision
@pytest.mark.parametrize("unit", [1e-3, 1e-8, 1e-20, 1e4])
def test_the_unit_of_v_does_not_matter(precision, unit):
    q, k, v = tensors()
    out = reference_attention(q, k, v * unit, scheme=SCHEMES[precision])
    assert compare(out, exact_attention(q, k, v * unit)).rel_l1 < BOUND[precision]


@each_precision
def test_a_shared_bias_of_k_changes_the_output_by_less_than_the_noise(precision):
    q, k, v = tensors(nk=512, d=128)
    bias = torch.zeros(128)
    bias[:6] = 40
    plain = reference_attention(q, k, v, scheme=SCHEMES[precision])
    for shift in (20.0, bias):
        shifted = reference_attention(q, k + shift, v, scheme=SCHEMES[precision])
        noise = compare(plain, exact_attention(q, k, v)).rel_l1
        assert compare(shifted, plain).rel_l1 < 0.5 * noise


def test_rotation_restores_int8_where_a_few_channels_carry_k():
    q, k, v = tensors(b=1, nq=512, nk=512, d=128)
    k[..., [3, 50]] *= 30
    q[..., [3, 50]] /= 30
    expected = exact_attention(q, k, v)
    without = replace(SCHEMES["int8"], rotate=False)
    assert compare(reference_attention(q, k, v, scheme=without), expected).cosine < 0.99
    assert compare(reference_attention(q, k, v, scheme=SCHEMES["int8"]), expected).cosine > 0.998


# -------------------------------------------------------------------------------- NaN and infinity
def spread(q, k, v, scheme):
    mine = reference_attention(q, k, v, scheme=scheme)
    torchs = F.scaled_dot_product_attention(q, k, v)
    return mine, torch.isfinite(mine), torch.isfinite(torchs)


@each_precision
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_is_not_finite_spreads_as_in_torch_and_no_further(precision, bad, where):
    q, k, v = tensors(nq=80, nk=80)
    clean = reference_attention(q, k, v, scheme=SCHEMES[precision])
    {"q": q, "k": k, "v": v}[where][0, 1, 5, 9] = bad
    mine, finite, torchs_finite = spread(q, k, v, SCHEMES[precision])
    assert not torchs_finite.all()
    if where != "k" or bad is torch.nan:
        assert torch.equal(finite, torchs_finite)
    else:
        # An infinite key: +inf scores make a row NaN, -inf scores drop the key from it.
        expected = exact_attention(q, k, v)
        assert torch.equal(finite, torch.isfinite(expected))
    assert torch.equal(mine[1], clean[1])
    assert torch.equal(mine[0, [0, 2, 3]], clean[0, [0, 2, 3]])


@each_precision
def test_infinite_values_keep_their_sign(precision):
    q, k, v = tensors(nq=40, nk=40)
    v[0, 0, 3, 2] = torch.inf
    v[0, 0, 4, 5] = -torch.inf
    out = reference_attention(q, k, v, scheme=SCHEMES[precision])
    assert (out[0, 0, :, 2] == torch.inf).all()
    assert (out[0, 0, :, 5] == -torch.inf).all()


def test_a_nan_query_poisons_its_own_row_only():
    q, k, v = tensors()
    clean = reference_attention(q, k, v, scheme=UNQUANTISED)
    q[0, 0, 5, 1] = torch.nan
    out = reference_attention(q, k, v, scheme=UNQUANTISED)
    assert out[0, 0, 5].isnan().all()
    rest = torch.ones_like(out, dtype=torch.bool)
    rest[0, 0, 5] = False
    # Its 127 neighbours lose one summand of their common mean, which is exact here.
    torch.testing.assert_close(out[rest], clean[rest])


# ------------------------------------------------------------------------------------------ context
@each_precision
def test_autocast_does_not_reach_the_emulation(precision):
    q, k, v = tensors()
    plain = reference_attention(q, k, v, scheme=SCHEMES[precision])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain, reference_attention(q, k, v, scheme=SCHEMES[precision]))


@pytest.mark.parametrize(
    ("field", "value"),
    [("qk", "int4"), ("pv", "fp8"), ("p_scaling", "three_level"), ("block_k", 48)],
)
def test_a_scheme_that_cannot_be_is_refused_with_what_can(field, value):
    with pytest.raises(ValueError, match=r"choose one of|multiple of 32"):
        Scheme(**{field: value})
