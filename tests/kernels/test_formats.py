"""Number formats against ml_dtypes, which shares no code with them, and their properties."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sageattention3.kernels.reference import formats


def all_bfloat16():
    """Every finite BF16 value: each binade, each tie of the small formats, subnormals."""
    x = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
        .float()
    )
    return x[torch.isfinite(x)]


def rounded_by(dtype, x):
    return torch.from_numpy(x.numpy().astype(dtype).astype(np.float32))


rows_of_blocks = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.sampled_from([32, 64])),
    elements=st.floats(-(2.0**20), 2.0**20, width=32),
)


# ---------------------------------------------------------------------------- element formats
def test_e2m1_rounds_every_bfloat16_as_ml_dtypes_does():
    x = all_bfloat16()
    assert torch.equal(formats.round_e2m1(x), rounded_by(ml_dtypes.float4_e2m1fn, x))


@given(hnp.arrays(np.float32, 64, elements=st.floats(-8, 8, width=32)))
def test_e2m1_rounds_any_float_as_ml_dtypes_does(values):
    x = torch.from_numpy(values)
    assert torch.equal(formats.round_e2m1(x), rounded_by(ml_dtypes.float4_e2m1fn, x))


def test_e2m1_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert formats.round_e2m1(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_rounding_to_e2m1_leaves_its_input_alone_and_keeps_nan():
    x = torch.tensor([0.3, torch.nan, -7.0])
    before = x.clone()
    rounded = formats.round_e2m1(x)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    assert rounded[1].isnan()
    assert rounded[2] == -6


def test_e4m3_rounds_every_bfloat16_as_ml_dtypes_does_and_saturates():
    x = all_bfloat16()
    expected = rounded_by(ml_dtypes.float8_e4m3fn, x.clamp(-448, 448))
    assert torch.equal(formats.round_e4m3(x), expected)
    assert formats.round_e4m3(torch.tensor([1e9, -449.0])).tolist() == [448.0, -448.0]


def test_e8m0_is_the_power_of_two_below_and_representable():
    x = all_bfloat16()
    x = x[x >= 2.0**-127]
    power = formats.floor_e8m0(x)
    assert ((power <= x) & (x < 2 * power.double())).all()
    assert torch.equal(power, rounded_by(ml_dtypes.float8_e8m0fnu, power))
    assert formats.floor_e8m0(torch.zeros(1)).item() == 2.0**-127


def test_codes_of_e2m1_are_the_bits_of_ml_dtypes():
    values = torch.tensor([*formats.E2M1_VALUES, *(-v for v in formats.E2M1_VALUES)])
    bits = values.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert formats.encode_e2m1(values).tolist() == bits.tolist() == list(range(16))
    assert torch.equal(formats.decode_e2m1(torch.arange(16, dtype=torch.uint8)), values)


@given(
    hnp.arrays(
        np.uint8,
        st.tuples(st.integers(1, 3), st.sampled_from([2, 8, 32])),
        elements=st.integers(0, 15),
    )
)
def test_packing_nibbles_is_reversible_and_puts_the_even_element_low(codes):
    codes = torch.from_numpy(codes)
    packed = formats.pack_nibbles(codes)
    assert packed.shape[-1] * 2 == codes.shape[-1]
    assert torch.equal(formats.unpack_nibbles(packed), codes)
    assert torch.equal(packed[..., 0] % 16, codes[..., 0])


def test_an_odd_number_of_codes_cannot_be_packed():
    with pytest.raises(ValueError, match="odd"):
        formats.pack_nibbles(torch.zeros(3, dtype=torch.uint8))


# ------------------------------------------------------------------------------ block formats
def nvfp4_oracle(x, tensor_scale):
    """Block by block in numpy and ml_dtypes: dequantised x [rows, n]."""
    out = np.zeros_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 16):
            block = x[row, start : start + 16] / tensor_scale
            # A subnormal tensor scale may be rounded far down, and the conversion then gives NaN.
            scale = np.minimum(np.abs(block).max() / np.float32(6), np.float32(448))
            scale = scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            if scale:
                codes = (block / scale).astype(ml_dtypes.float4_e2m1fn)
                out[row, start : start + 16] = codes.astype(np.float32) * scale * tensor_scale
    return out


@given(rows_of_blocks)
@example(np.full((1, 32), 4.142e-42, np.float32))
def test_nvfp4_equals_a_block_by_block_oracle(x):
    blocks = formats.quantise_nvfp4(torch.from_numpy(x))
    tensor_scale = np.float32(np.abs(x).max() / np.float32(448 * 6)) or np.float32(1)
    np.testing.assert_array_equal(blocks.dequantise().numpy(), nvfp4_oracle(x, tensor_scale))


@given(rows_of_blocks)
def test_mxfp4_equals_a_block_by_block_oracle(x):
    expected = np.zeros_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 32):
            block = x[row, start : start + 32]
            amax = np.abs(block).max()
            if amax >= 2.0**-125:
                scale = np.float32(2.0) ** (np.floor(np.log2(np.float64(amax))) - 2)
                codes = (block / np.float32(scale)).astype(ml_dtypes.float4_e2m1fn)
                expected[row, start : start + 32] = codes.astype(np.float32) * np.float32(scale)
    out = formats.quantise_mxfp4(torch.from_numpy(x)).dequantise().numpy()
    np.testing.assert_allclose(out, expected, atol=2.0**-125)


@given(rows_of_blocks, st.integers(-60, 60))
def test_nvfp4_does_not_depend_on_the_unit_of_its_input(x, exponent):
    x = torch.from_numpy(np.round(x, 3))
    x = torch.where(x.abs() < 1e-2, 0.0, x)
    scaled = formats.quantise_nvfp4(x * 2.0**exponent).dequantise()
    assert torch.equal(scaled, formats.quantise_nvfp4(x).dequantise() * 2.0**exponent)


@given(rows_of_blocks)
def test_searching_scales_never_raises_the_error_of_a_block(x):
    x = torch.from_numpy(x)

    def block_errors(search):
        blocks = formats.quantise_nvfp4(x, search=search)
        error = blocks.without_tensor_scale() - x / blocks.tensor_scale
        return error.unflatten(-1, (-1, 16)).square().sum(-1)

    assert (block_errors(True) <= block_errors(False)).all()


def test_searching_scales_lowers_the_error_of_gaussian_values():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    plain, searched = (
        (formats.quantise_nvfp4(x, search=s).dequantise() - x).square().mean()
        for s in (False, True)
    )
    assert searched < 0.9 * plain


@given(rows_of_blocks)
@example(np.full((1, 32), 1e-45, np.float32))  # the scale of the matrix itself rounds to zero
@example(np.full((1, 32), 3e-42, np.float32))  # and here to a neighbour far from it
def test_block_scales_of_nvfp4_reach_but_never_exceed_the_maximum_of_e4m3(x):
    largest = formats.quantise_nvfp4(torch.from_numpy(x)).scales.max()
    if np.abs(x).max() >= 448 * 6 * np.finfo(np.float32).tiny:
        assert largest == 448
    else:
        assert largest <= 448


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-40, 1e-30, 1e30, 3e38])
def test_nvfp4_is_finite_at_any_magnitude(magnitude):
    x = torch.linspace(-1, 1, 64).reshape(2, 32) * magnitude
    for search in (False, True):
        out = formats.quantise_nvfp4(x, search=search).dequantise()
        assert torch.isfinite(out).all()
        if magnitude > 1e-38:
            assert (out - x).abs().max() <= 0.17 * magnitude


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_eight_bits_divide_by_their_own_scale_and_never_by_zero(kind):
    x = torch.stack([torch.zeros(64), torch.linspace(-3, 2, 64)])
    values, scale = formats.quantise_8bit(x, x.abs().amax(-1, keepdim=True), kind)
    assert (values[0] == 0).all()
    assert values[1].abs().max() == (127 if kind == "int8" else 448)
    step = 0.5 * scale[1] if kind == "int8" else (x[1].abs() / 16).clamp_min(scale[1] * 2**-10)
    assert ((values * scale - x)[1].abs() <= step * 1.0001).all()
    if kind == "int8":
        assert torch.equal(values, values.round())


def test_eight_bits_do_not_hide_what_is_not_finite():
    x = torch.tensor([[1.0, torch.inf], [1.0, torch.nan]])
    for kind in ("int8", "e4m3"):
        values, scale = formats.quantise_8bit(x, x.abs().amax(-1, keepdim=True), kind)
        assert not torch.isfinite(values * scale).all(-1).any()


@given(st.integers(1, 70), st.sampled_from([16, 32]))
def test_padding_appends_zeros_up_to_the_next_multiple(n, multiple):
    x = torch.ones(2, n)
    padded = formats.pad_to_multiple(x, multiple)
    assert padded.shape[-1] % multiple == 0
    assert padded.shape[-1] - n < multiple
    assert padded.sum() == 2 * n
