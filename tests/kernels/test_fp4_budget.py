"""Issue slots of the FP4 attention kernel's loop: all that is known of its speed without a GPU.

A turn takes 128 keys past the 16 rows of each warp (64 keys in INT8 of 256 channels). Its bound in
slots is set so that three or four warps can share a scheduler with the tensor cores busy;
docs/fp4.md has the model.
"""

import pytest
from sageattention3.kernels.jit.build import build
from sageattention3.kernels.jit.report import make_report
from sageattention3.kernels.launch.sm120_fp4 import NATIVE, TILES, attention_variant

SM = 120
# (precision, head_dim, smooth_q): most slots of a turn without mask.
BUDGETS = {
    ("fp4", 64, False): 480,
    ("fp4", 64, True): 495,
    ("fp4", 128, False): 570,
    ("fp4", 128, True): 600,
    ("int8_fp4", 64, False): 530,
    ("int8_fp4", 128, False): 610,
}


@pytest.fixture(scope="module")
def rows():
    """Report rows by (precision, head_dim, smooth_q, masked)."""
    keys = [
        (precision, d, smooth_q, masked)
        for precision, d, masked in TILES
        for smooth_q in ((False, True) if precision == "fp4" else (False,))
    ]
    variants = [attention_variant(NATIVE, *key) for key in keys]
    report = make_report(build((variant, SM) for variant in variants))
    return dict(zip(keys, report, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "head_dim", "smooth_q"), BUDGETS)
def test_a_turn_of_the_loop_keeps_its_budget_of_issue_slots(rows, precision, head_dim, smooth_q):
    key = precision, head_dim, smooth_q
    assert rows[(*key, False)].loop["total"] <= BUDGETS[key]


@pytest.mark.slow
def test_the_loop_takes_no_more_products_than_the_shapes_need(rows):
    """Products with V have one more tile of 8 columns than V, for the sum of P."""
    for (precision, head_dim, _, masked), row in rows.items():
        blocks = TILES[precision, head_dim, masked].blocks
        steps = -(-head_dim // 64) if precision == "fp4" else head_dim // 32
        products = blocks * (8 * steps + head_dim // 8 + 1)
        assert row.loop["tensor"] == products, (precision, head_dim, masked)


@pytest.mark.slow
def test_only_the_masked_kernel_of_256_channels_spills(rows):
    spilling = [key for key, row in rows.items() if row.spill_stores or row.spill_loads]
    assert {(*key[:2], key[3]) for key in spilling} <= {("fp4", 256, True)}


@pytest.mark.slow
def test_products_are_those_of_their_precision(rows):
    values = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"
    for (precision, *_), row in rows.items():
        kinds = {opcode for opcode in row.opcodes if "MMA" in opcode}
        assert kinds == ({values} if precision == "fp4" else {values, "IMMA.16832.S8.S8"})
