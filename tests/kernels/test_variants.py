"""Every kernel that ships, compiled for every GPU that it serves: resources and machine code."""

import pytest
from sageattention3.kernels.jit import archs
from sageattention3.kernels.jit.build import build
from sageattention3.kernels.jit.report import make_report
from sageattention3.kernels.jit.variants import registered

pytestmark = pytest.mark.timeout(1200)  # two busy cores take 300 s for the fixture alone


@pytest.fixture(scope="module")
def rows():
    """One report row per kernel and target, built once per state of the sources.

    What is only built on first use (emulations) is built for the oldest GPU: all five would take
    longer than the rest of the tests.
    """
    variants = registered()
    assert variants, "no launcher in kernels/launch declares VARIANTS"
    oldest = archs.SHIPPED[0]
    return make_report(
        build(
            (v, sm)
            for v in variants
            for sm in archs.SHIPPED
            if v.is_built_ahead(sm) or (sm == oldest and v.serves(sm))
        )
    )


@pytest.mark.slow
def test_every_kernel_compiles_and_keeps_the_promises_of_its_variant(rows):
    assert {f"{row.kernel} for {row.arch}": row.faults for row in rows if row.faults} == {}


@pytest.mark.slow
def test_no_kernel_touches_local_memory_without_a_documented_spill(rows):
    allowed = {v.name for v in registered() if v.spill_bytes}
    touching = [f"{r.kernel} for {r.arch}" for r in rows if r.instructions["local"]]
    assert [name for name in touching if name.partition(" for ")[0] not in allowed] == []
