"""Which target is compiled for which GPU by which NVRTC."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sageattention3.kernels.jit import archs

POLICY = [
    # compute capability, NVRTC, target
    (80, (12, 8), "sm_80"),
    (86, (12, 8), "sm_86"),
    (87, (12, 8), "sm_87"),
    (88, (13, 5), "sm_87"),
    (89, (12, 8), "sm_89"),
    (89, (13, 5), "sm_89"),
    (90, (12, 8), "sm_90a"),
    (90, (13, 5), "sm_90a"),
    (100, (12, 8), "sm_100"),
    (103, (12, 8), "sm_100"),
    (110, (13, 0), "sm_110"),
    (120, (12, 8), "sm_120a"),
    (120, (12, 9), "sm_120f"),
    (120, (13, 5), "sm_120f"),
    (121, (12, 9), "sm_120f"),
    (121, (13, 0), "sm_120f"),
]


@pytest.mark.parametrize(("sm", "nvrtc", "expected"), POLICY)
def test_target_follows_capability_and_nvrtc_version(sm, nvrtc, expected):
    assert archs.target(sm, nvrtc) == expected


@pytest.mark.parametrize(("sm", "nvrtc"), [(121, (12, 8)), (110, (12, 9))])
def test_gpu_newer_than_nvrtc_is_refused_with_the_version_it_needs(sm, nvrtc):
    with pytest.raises(archs.UnsupportedArchError, match=r"needs NVRTC \d+\.\d+, found 12\.\d"):
        archs.target(sm, nvrtc)


@pytest.mark.parametrize("sm", [61, 70, 75, 130])
def test_gpu_outside_the_supported_range_is_refused(sm):
    with pytest.raises(archs.UnsupportedArchError, match=f"{sm // 10}.{sm % 10} is not supported"):
        archs.target(sm, (13, 5))


@pytest.mark.parametrize(
    ("name", "sm"),
    [("sm_80", 80), ("sm_90a", 90), ("sm_120a", 120), ("sm_120f", 120), ("8.9", 89), ("12.1", 121)],
)
def test_architectures_are_read_in_the_spellings_people_use(name, sm):
    assert archs.parse(name) == sm


@given(st.text(st.characters(exclude_categories=["Nd"])))
def test_text_without_a_number_is_refused_as_an_architecture(text):
    with pytest.raises(archs.UnsupportedArchError, match=r"write e\.g\. sm_89"):
        archs.parse(text)


@pytest.mark.parametrize("sm", archs.SHIPPED)
def test_every_shipped_target_is_known_to_the_oldest_nvrtc(sm):
    assert archs.target(sm, archs.OLDEST_NVRTC).startswith(f"sm_{sm}")
