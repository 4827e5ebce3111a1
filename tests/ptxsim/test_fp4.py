"""FP4 kernels with their native instructions, interpreted, against models and exact attention."""

import pytest
import torch
from sageattention3.kernels.launch import sm120_fp4
from sageattention3.kernels.launch.fp4_proof import probe_units, prove
from sageattention3.kernels.launch.sm120_fp4 import EMULATED, NATIVE, TILES, attend
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import (
    SCHEMES,
    exact_attention,
    fp4_model,
    int8_fp4_model,
    reference_attention,
)
from sageattention3.kernels.reference.fp4_layout import unpack_blocks, unpack_int8_blocks

from .calls import in_any_order, token_major
from .ptx import KernelError
from .simulator import Simulator

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def simulator(use):
    return use(Simulator(120))


each_precision = pytest.mark.parametrize("precision", ["fp4", "int8_fp4"])


def tensors(hq=2, hk=1, nq=40, nk=140, d=64, dtype=torch.float32, seed=0):
    q, k, v = token_major((hq, nq), (hk, nk), (hk, nk), d=d, seed=seed)
    q[..., :1] += 3
    k[..., :2] += 4
    v[..., -1:] -= 2
    return [x.to(dtype) for x in (q, k, v)]


def run(q, k, v, *, mask=None, causal=False, fp4=NATIVE, **options):
    scale = q.shape[-1] ** -0.5
    return attend(q, k, v, mask=mask, scale=scale, causal=causal, fp4=fp4, **options)


def model_operands(q, k, v, precision, *, masked, smooth_q, live=None):
    """What the kernels' model makes of a call's tensors."""
    scale, d = q.shape[-1] ** -0.5, q.shape[-1]
    if precision == "int8_fp4":
        return int8_fp4_model.quantise(q, k, v, scale=scale, live=live)[1]
    tokens = TILES[precision, d, masked].q_block_tokens
    options = {"scale": scale, "q_block_tokens": tokens, "smooth_q": smooth_q, "live": live}
    return fp4_model.quantise(q, k, v, **options)[1]


def check(q, k, v, *, precision="fp4", smooth_q=True, **options):
    """Against the kernels' model from inputs to outputs, and against exact attention."""
    out = run(q, k, v, precision=precision, smooth_q=smooth_q, **options)
    right = exact_attention(q, k, v, **options)
    mask, causal = options.get("mask"), options.get("causal", False)
    masked = mask is not None
    operands = model_operands(q, k, v, precision, masked=masked, smooth_q=smooth_q)
    model, _ = fp4_model.attend(operands, causal=causal, mask=mask)
    assert compare(out, model).rel_l1 < 5e-3
    scheme = reference_attention(q, k, v, scheme=SCHEMES[precision], **options)
    if smooth_q:
        assert compare(out, right).rel_l1 <= 1.15 * compare(scheme, right).rel_l1
    return out


def test_native_units_are_what_the_proof_wants():
    assert probe_units(CPU, NATIVE) is None


def test_a_chip_without_them_has_emulated_units(use):
    use(Simulator(80))
    assert probe_units(CPU, EMULATED) is None
    given = tensors()
    assert compare(run(*given, fp4=EMULATED), exact_attention(*given)).rel_l1 < 0.25


def test_the_proof_holds():
    assert prove("int8_fp4", CPU, 64, torch.bfloat16) is None


@each_precision
def test_warps_may_come_in_any_order(simulator, precision):
    given = tensors(hq=1, nq=40, nk=400)  # more tiles than stages
    in_any_order(simulator, range(3), lambda: run(*given, precision=precision))


@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("precision", "smooth_q"), [("fp4", False), ("fp4", True), ("int8_fp4", True)]
)
def test_every_head_dim_with_and_without_smoothing_of_q(d, precision, smooth_q):
    check(*tensors(d=d), precision=precision, smooth_q=smooth_q)


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (16, 65), (130, 129)])
@pytest.mark.parametrize("causal", [False, True])
@each_precision
def test_ragged_ends(nq, nk, causal, precision):
    if causal:
        nk = min(nq, nk)
    check(*tensors(nq=nq, nk=nk), causal=causal, precision=precision)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("causal", [False, True])
@each_precision
def test_masks(kind, causal, precision):
    q, k, v = tensors(hq=2, hk=1, nq=70, nk=70)
    mask = torch.rand(1, 2, 70, 70, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 0] = True
    mask[:, :, 9] = False
    if kind == "additive":
        bias = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
        mask = bias.masked_fill(~mask, -torch.inf)
    out = check(q, k, v, mask=mask, causal=causal, precision=precision)
    assert (out[:, :, 9] == 0).all()


def with_dead_keys(dtype):
    """q, k, v of 40 channels and which keys count; the others hold what must not."""
    q, k, v = tensors(hq=4, hk=2, nq=300, nk=200, d=40, dtype=dtype)
    live = torch.rand(1, 1, 200, generator=torch.Generator().manual_seed(1)) < 0.7
    k[:, :, ~live[0, 0]] = 1e4
    return q, k, v, live


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int8_quantising_kernels_write_what_their_model_writes(dtype):
    q, k, v, live = with_dead_keys(dtype)
    packed = sm120_fp4.pack(q, k, v, "int8_fp4", live, 0.2, masked=False, smooth_q=False)
    layout = packed.layout
    blocks = packed.part("kv", torch.uint8, 1, 2, layout.kv_blocks, layout.kv_block_bytes)
    wide = [torch.nn.functional.pad(x, (0, 24)) for x in (q, k, v)]
    codes, expected = int8_fp4_model.quantise(*wide, scale=0.2, live=live)
    kv = unpack_int8_blocks(blocks, 64)
    q_codes = packed.part("q_codes", torch.int8, 1, 4, 300, 64)
    for mine, right in ((kv.k, codes.k), (q_codes, expected.q), (kv.v_scales, codes.v_scales)):
        assert (mine.float() != right.float()).double().mean() < 1e-3
    zeros = (kv.v & 7 == 0) & (codes.v & 7 == 0)
    assert ((kv.v != codes.v) & ~zeros).double().mean() < 1e-3
    assert torch.allclose(kv.k_scales, codes.k_scales, rtol=1e-4)
    kv_scales = packed.part("kv_scales", torch.float32, 1, 2, 2)
    assert torch.allclose(kv_scales, expected.kv_scales, rtol=1e-4)
    q_scales = packed.part("q_scales", torch.float32, 1, 4, 300)
    assert torch.allclose(q_scales, expected.q_scales, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantising_kernels_write_what_their_model_writes(dtype):
    q, k, v, live = with_dead_keys(dtype)
    packed = sm120_fp4.pack(q, k, v, "fp4", live, 0.2, masked=False, smooth_q=True)
    layout = packed.layout
    blocks = packed.part("kv", torch.uint8, 1, 2, layout.kv_blocks, layout.kv_block_bytes)
    wide = [torch.nn.functional.pad(x, (0, 24)) for x in (q, k, v)]
    codes, expected = fp4_model.quantise(*wide, scale=0.2, q_block_tokens=128, live=live)
    kv = unpack_blocks(blocks, 64)
    q_scales = packed.part("q_scales", torch.uint8, 1, 4, 300, 4)
    pairs = [*zip(kv, codes.kv, strict=True), (q_scales, codes.q_scales)]
    for mine, right in pairs:
        zeros = (mine & 7 == 0) & (right & 7 == 0)  # minus zero is zero
        assert ((mine != right) & ~zeros).double().mean() < 1e-3
    factors = packed.part("q_factors", torch.float32, 1, 4, layout.q_blocks, 2)
    assert torch.allclose(factors[:, :, :3], expected.q_factors, rtol=1e-4)


def test_pieces_give_the_same_bits_as_one_launch(monkeypatch):
    given = tensors(hq=1, nq=300, nk=130)
    expected = [run(*given, causal=causal) for causal in (False, True)]
    monkeypatch.setattr(sm120_fp4, "MOST_DELTA_BYTES", 1)
    for causal in (False, True):
        assert torch.equal(run(*given, causal=causal), expected[causal])


@each_precision
def test_log_sum_exp_is_that_of_the_scores(precision):
    q, k, v = tensors()
    _, lse = run(q, k, v, precision=precision, return_lse=True)
    right = (q @ k.repeat_interleave(2, 1).mT * 64**-0.5).logsumexp(-1)
    assert (lse - right).abs().max() < 0.2


@each_precision
def test_nan_reaches_the_output_and_huge_numbers_stay_finite(precision):
    for index in range(3):
        given = tensors(hq=1)
        given[index][0, 0, 3, 5] = torch.nan
        assert run(*given, precision=precision).isnan().any()
    q, k, v = tensors(hq=1)
    out = run(q * 1e36, k * 1e36, v * 1e36, precision=precision)
    assert out.isfinite().all()
    assert out.any(-1).all()  # no row lost its maximum


def check_plain_and_sharp(precision):
    """Sharp rows of scores find new maxima in most blocks of keys."""
    q, k, v = tensors(hq=1, nq=40, nk=200)
    check(q, k, v, precision=precision)
    check(4 * q, k, v, precision=precision)


@each_precision
def test_plain_and_sharp_rows(precision):
    check_plain_and_sharp(precision)


# Those of the other sources: test_mutations.py.
@pytest.mark.parametrize(
    "fault",
    [
        ("fp4_balance.cuh", "part & distance ? -1.0f", "part & distance ? 1.0f"),  # rotation
        ("fp4_balance.cuh", "return sqrtf(share", "return (share"),
    ],
)
def test_a_fault_in_balance_and_rotation_is_noticed(fault, use):
    use(Simulator(120, edit=fault))
    with pytest.raises((AssertionError, KernelError)):
        check_plain_and_sharp("fp4")


@pytest.mark.parametrize(
    "fault",
    [
        ("int8_scores.cuh", "threadIdx.x % 4 * 4", "(threadIdx.x % 4 ^ 1) * 4"),  # scales of K
        ("int8_scores.cuh", "LARGEST_INT8_FACTOR / p.", "1e-6f / p."),  # of scores at their largest
        ("int8_scores.cuh", "fmaf(-MAGIC, factor[r], x)", "x"),
        ("fp4_scores.cuh", "q[step][r + 2]", "q[step][2 * r + 1]"),  # halves of Q
        ("int8_queries_keys.cuh", "(start + channel)", "(start)"),  # K's mean
        ("fp4_warp.cuh", "0x7351 : 0x6240", "0x7531 : 0x6420"),  # order of P's scales
        ("fp4_layout.cuh", "8 * j + 2 * t + e", "8 * t + 2 * j + e"),  # rows of K
    ],
)
def test_a_fault_in_the_sources_of_int8_scores_is_noticed(fault, use):
    use(Simulator(120, edit=fault))
    with pytest.raises((AssertionError, KernelError)):
        check_plain_and_sharp("int8_fp4")
