"""FP4 kernels with their native instructions, interpreted, against their model and exact attention.

The bars are those of tests/gpu/test_fp4.py, where emulated products stand in for native ones.
"""

import pytest
import torch
from sageattention3.kernels.launch import sm120_fp4
from sageattention3.kernels.launch.fp4_proof import probe_units, prove
from sageattention3.kernels.launch.fp4_quantise import DELTA_BYTES, smoothed_away
from sageattention3.kernels.launch.geometry import padded_head_dim
from sageattention3.kernels.launch.operands import readable
from sageattention3.kernels.launch.sm120_fp4 import EMULATED, NATIVE, TILES, attend, pack
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import (
    SCHEMES,
    exact_attention,
    fp4_model,
    reference_attention,
)
from sageattention3.kernels.reference.fp4_layout import rows_of_keys, unpack_blocks

MODEL_BAR, EXACT_BAR, CODE_BAR = 1e-3, 1.15, 1e-3
SEEDS = (0, 1, 2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def simulator(use, simulators):
    return use(simulators[120])


def tensors(b=1, hq=2, hk=1, nq=40, nk=140, d=64, dtype=torch.float32, seed=0):
    """q [b, hq, nq, d], k and v [b, hk, nk, d], token-major, with channels that have a bias."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(b, n, h, d, generator=generator).transpose(1, 2)
        for h, n in ((hq, nq), (hk, nk), (hk, nk))
    )
    q[..., :1] += 3
    k[..., :2] += 4
    v[..., -1:] -= 2
    return [x.to(dtype) for x in (q, k, v)]


def packed_operands(q, k, v, *, smooth_q, masked, live=None, causal=False):
    """((scales of Q, codes of K and V), operands for the model), from the quantising kernels."""
    scale = q.shape[-1] ** -0.5
    q, k, v = readable(q, k, v)
    packed = pack(q, k, v, live_keys=live, scale=scale, masked=masked, smooth_q=smooth_q)
    layout, (b, hq, nq, _), hk = packed.layout, q.shape, k.shape[1]
    codes = packed.part("q_codes", torch.uint8, b, hq, nq, layout.k_dim // 2)
    blocks = packed.part("kv", torch.uint8, b, hk, layout.kv_blocks, layout.kv_block_bytes)
    kv = unpack_blocks(blocks, layout.head_dim)
    q_scales = packed.part("q_scales", torch.uint8, b, hq, nq, layout.k_dim // 16)
    delta = None
    if smooth_q:
        shape = b, hq, layout.q_blocks, layout.kv_blocks, 32, 4
        pairs = torch.zeros(shape)
        assert pairs.nbytes == b * hq * layout.q_blocks * layout.kv_blocks * DELTA_BYTES
        heads, q_blocks = range(b * hq), range(layout.q_blocks)
        smoothed_away(packed, hq, k, live, pairs, heads=heads, q_blocks=q_blocks, causal=causal)
        assert torch.equal(pairs[..., :2], pairs[..., 2:])
        delta = pairs[..., :2].flatten(-2)[..., rows_of_keys()].flatten(-2)
    return (q_scales, kv), fp4_model.Operands(
        q=fp4_model.dequantise_blocks(
            torch.stack([codes & 15, codes >> 4], -1).flatten(-2), q_scales
        ),
        q_factors=packed.part("q_factors", torch.float32, b, hq, layout.q_blocks, 2),
        k=fp4_model.dequantise_blocks(kv.k, kv.k_scales).flatten(2, 3),
        v=fp4_model.dequantise_blocks(kv.v, kv.v_scales).movedim(2, 3).flatten(3),
        kv_scales=packed.part("kv_scales", torch.float32, b, hk, 2),
        v_means=packed.part("v_means", torch.float32, b, hk, layout.head_dim),
        delta=delta,
        q_block_tokens=layout.q_block_tokens,
        kv_len=k.shape[2],
    )


def run(q, k, v, *, mask=None, causal=False, fp4=NATIVE, **options):
    scale = q.shape[-1] ** -0.5
    return attend(q, k, v, mask=mask, scale=scale, causal=causal, fp4=fp4, **options)


def check(simulator, q, k, v, *, mask=None, causal=False, smooth_q=True, seeds=SEEDS, fp4=NATIVE):
    """Near the model on the same bytes and near exact attention, however warps interleave."""
    outputs = []
    for simulator.seed in seeds:
        options = {"mask": mask, "causal": causal}
        outputs.append(run(q, k, v, **options, smooth_q=smooth_q, fp4=fp4))
    out = outputs[0]
    assert all(torch.equal(other, out) for other in outputs)
    live = None if mask is None else sm120_fp4.find_live_keys(mask, causal, q, k)
    masked = mask is not None
    _, operands = packed_operands(
        q, k, v, smooth_q=smooth_q, masked=masked, live=live, causal=causal
    )
    model, _ = fp4_model.attend(operands, **options)
    errors = compare(out, model[..., : q.shape[-1]])
    assert errors.finite, errors
    assert errors.rel_l1 < MODEL_BAR, errors
    if smooth_q:
        right = exact_attention(q, k, v, **options)
        scheme = reference_attention(q, k, v, scheme=SCHEMES["fp4"], **options)
        assert compare(out, right).rel_l1 < EXACT_BAR * compare(scheme, right).rel_l1 + 1e-4
    return out


def test_native_units_are_what_the_proof_wants():
    assert probe_units(CPU, NATIVE) is None


def test_a_chip_without_them_has_emulated_units(use, simulators):
    simulator = use(simulators[80])
    assert probe_units(CPU, EMULATED) is None
    check(simulator, *tensors(), fp4=EMULATED, seeds=(0, 1))


def test_the_native_kernel_agrees_with_the_emulated_one():
    assert prove(CPU, 64, torch.bfloat16) is None


@pytest.mark.parametrize("d", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("smooth_q", [False, True])
def test_every_head_dim_with_and_without_smoothing_of_q(simulator, d, smooth_q):
    check(simulator, *tensors(d=d), smooth_q=smooth_q, seeds=(0, 3))


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (17, 64), (16, 65), (130, 129), (257, 300)])
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_ends(simulator, nq, nk, causal):
    check(simulator, *tensors(nq=nq, nk=min(nq, nk) if causal else nk), causal=causal)


def test_more_tiles_than_stages(simulator):
    """Stages are filled again while slow warps may still read them."""
    check(simulator, *tensors(hq=1, nq=256, nk=900), seeds=range(6))


def test_query_heads_share_key_heads(simulator):
    check(simulator, *tensors(b=2, hq=6, hk=2, nq=70, nk=150), causal=False, seeds=(0, 5))


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(simulator, kind, causal):
    q, k, v = tensors(hq=4, hk=2, nq=100, nk=100)
    mask = torch.rand(1, 4, 100, 100, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 0] = True
    mask[:, :, 9] = False
    if kind == "additive":
        bias = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
        mask = bias.masked_fill(~mask, -torch.inf)
    assert (check(simulator, q, k, v, mask=mask, causal=causal, seeds=(0, 1))[:, :, 9] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantising_kernels_write_what_their_model_writes(dtype):
    q, k, v = tensors(hq=4, hk=2, nq=300, nk=200, d=40, dtype=dtype)
    live = torch.rand(1, 1, 200, generator=torch.Generator().manual_seed(1)) < 0.7
    k[:, :, ~live[0, 0]] = 1e4
    (q_scales, kv), operands = packed_operands(q, k, v, smooth_q=True, masked=False, live=live)
    wide = [torch.nn.functional.pad(x, (0, padded_head_dim(40) - 40)) for x in (q, k, v)]
    tokens = TILES[64, False].q_block_tokens
    codes, expected = fp4_model.quantise(*wide, scale=40**-0.5, q_block_tokens=tokens, live=live)
    pairs = [(q_scales, codes.q_scales)]
    pairs += [(getattr(kv, name), getattr(codes.kv, name)) for name in ("k_scales", "v_scales")]
    pairs += [(getattr(operands, name), getattr(expected, name)) for name in ("q", "k", "v")]
    for mine, right in pairs:
        assert (mine != right).double().mean() < CODE_BAR
    blocks = expected.q_factors.shape[2]
    assert torch.allclose(operands.q_factors[:, :, :blocks], expected.q_factors, rtol=1e-4)
    assert torch.allclose(operands.kv_scales, expected.kv_scales, rtol=1e-4)
    assert compare(operands.delta[:, :, :blocks], expected.delta).rel_l1 < 1e-3


def test_pieces_give_the_same_bits_as_one_launch(monkeypatch):
    given = tensors(hq=2, nq=300, nk=130)
    expected = [run(*given, causal=causal) for causal in (False, True)]
    monkeypatch.setattr(sm120_fp4, "MOST_DELTA_BYTES", 1)
    for causal in (False, True):
        assert torch.equal(run(*given, causal=causal), expected[causal])


def test_log_sum_exp_is_that_of_the_scores():
    q, k, v = tensors()
    _, lse = run(q, k, v, return_lse=True)
    right = (q @ k.repeat_interleave(2, 1).mT * 64**-0.5).logsumexp(-1)
    assert (lse - right).abs().max() < 0.2


def test_nan_reaches_the_output_and_huge_numbers_stay_finite():
    for index in range(3):
        given = tensors(hq=1)
        given[index][0, 0, 3, 5] = torch.nan
        assert run(*given).isnan().any()
    q, k, v = tensors(hq=1)
    out = run(q * 1e36, k * 1e36, v * 1e36)
    assert out.isfinite().all()
    assert out.any(-1).all()  # no row lost its maximum
