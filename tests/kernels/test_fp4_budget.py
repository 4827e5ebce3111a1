"""Issue slots of the FP4 attention kernel's loop: all that is known of its speed without a GPU.

A turn takes 128 keys past the 16 rows of each warp. Its bound in slots is set so that three or four
warps can share a scheduler with the tensor cores busy; docs/fp4.md has the model.
"""

import pytest
from sageattention3.kernels.jit.build import build
from sageattention3.kernels.jit.report import make_report
from sageattention3.kernels.launch.sm120_fp4 import NATIVE, TILES, attention_variant

SM = 120
# (head_dim, smooth_q): most slots of a turn without mask. Products with V have one more tile of 8
# columns than V, for the sum of P; those with K take 64 channels each.
BUDGETS = {(64, False): 480, (64, True): 495, (128, False): 570, (128, True): 600}


@pytest.fixture(scope="module")
def rows():
    """Report rows by (head_dim, smooth_q, masked)."""
    keys = [(d, smooth_q, masked) for d, masked in TILES for smooth_q in (False, True)]
    variants = [attention_variant(NATIVE, *key) for key in keys]
    report = make_report(build((variant, SM) for variant in variants))
    return dict(zip(keys, report, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "smooth_q"), BUDGETS)
def test_a_turn_of_the_loop_keeps_its_budget_of_issue_slots(rows, head_dim, smooth_q):
    assert rows[head_dim, smooth_q, False].loop["total"] <= BUDGETS[head_dim, smooth_q]


@pytest.mark.slow
def test_the_loop_takes_no_more_products_than_the_shapes_need(rows):
    for (head_dim, _, masked), row in rows.items():
        k_dim = -(-head_dim // 64) * 64
        products = 16 * k_dim // 64 + 2 * (head_dim // 8 + 1)
        assert row.loop["tensor"] == products, (head_dim, masked)


@pytest.mark.slow
def test_only_the_masked_kernel_of_256_channels_spills(rows):
    spilling = [key for key, row in rows.items() if row.spill_stores or row.spill_loads]
    assert {(head_dim, masked) for head_dim, _, masked in spilling} <= {(256, True)}


@pytest.mark.slow
def test_products_are_block_scaled_ones(rows):
    for row in rows.values():
        kinds = {opcode for opcode in row.opcodes if "MMA" in opcode}
        assert kinds == {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"}
