"""Variants: how a launcher's declaration becomes a C++ name and a parameter layout."""

import pytest
from sageattention3.kernels.jit.variants import Variant, registered


def test_template_arguments_are_spelled_as_cpp_spells_them(saxpy):
    variant = saxpy(template=(128, True, False, "Mask::kBool"))
    assert variant.expression == "saxpy<128, true, false, Mask::kBool>"


def test_kernel_without_template_arguments_is_named_plainly(saxpy):
    assert saxpy(template=()).expression == "saxpy"


@pytest.mark.parametrize(
    ("params", "size"), [("Q", 8), ("QQQf", 32), ("iQ", 16), ("Qi", 16), ("QifQ", 24)]
)
def test_parameters_are_padded_as_c_pads_a_struct(saxpy, params, size):
    assert saxpy(params=params).packer.size == size


def test_spill_allowance_without_a_reason_is_refused(saxpy):
    with pytest.raises(ValueError, match="needs a spill_reason"):
        saxpy(spill_bytes=8)


def test_malformed_parameter_format_fails_where_it_is_declared(saxpy):
    with pytest.raises(Exception, match="bad char in struct format"):
        saxpy(params="Qz")


def test_variant_serves_only_its_range_of_capabilities(saxpy):
    variant = saxpy(first_sm=89, last_sm=90)
    assert [sm for sm in (80, 86, 89, 90, 100, 120) if variant.serves(sm)] == [89, 90]


def test_variant_is_built_ahead_only_where_it_is_said_to_be_used(saxpy):
    variant = saxpy(first_sm=80, ahead_from=120)
    assert [sm for sm in (80, 90, 120) if variant.serves(sm)] == [80, 90, 120]
    assert [sm for sm in (80, 90, 120) if variant.is_built_ahead(sm)] == [120]


def test_nothing_of_fp4_is_built_ahead_for_a_gpu_without_fp4_units():
    ahead = [variant.name for variant in registered() if variant.is_built_ahead(90)]
    assert ahead
    assert not [name for name in ahead if "fp4" in name]


def test_registered_variants_are_unique_and_their_sources_ship():
    from sageattention3.demo.pack import ROOT

    variants = registered()
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        assert isinstance(variant, Variant)
        assert (ROOT / "kernels" / "cuda" / variant.source).is_file(), variant.name
