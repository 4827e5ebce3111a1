"""Attention with NVFP4 values through the emulated product, which any NVIDIA GPU has.

Three bars: what the quantising kernels write is what their model writes; the attention kernel
computes on those bytes what its model does; and the whole is no farther from exact attention than
the scheme in plain torch, since a mistake that kernel and model share shows nowhere else.
"""

import pytest
import torch
from sageattention3.kernels import attention, explain
from sageattention3.kernels.launch import sm120_fp4
from sageattention3.kernels.launch.fp4_backends import EMULATED_FP4, EMULATED_INT8_FP4
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
    int8_fp4_model,
    reference_attention,
)
from sageattention3.kernels.reference.fp4_layout import (
    Int8KvCodes,
    KvCodes,
    int8_scale_of_keys,
    rows_of_keys,
    unpack_blocks,
    unpack_int8_blocks,
)
from sageattention3.kernels.reference.sampling import sampled_mean

from . import calls
from .calls import mask_of_kind, random_mask

pytestmark = pytest.mark.gpu

# Relative L1 between a kernel and its model on the same bytes.
MODEL_BAR = 1e-3
# Times the scheme's own error: kernels cut blocks of queries elsewhere and scale by norms. Of few
# queries a handful of codes decides; models of kernel and scheme differ by up to 1.8 there.
EXACT_BAR, EXACT_BAR_OF_FEW, FEW = 1.15, 2.5, 32
# Share of values whose code may differ: means are summed in another order.
CODE_BAR = 1e-3

each_precision = pytest.mark.parametrize("precision", ["fp4", "int8_fp4"])
each_scheme = pytest.mark.parametrize(
    ("precision", "smooth_q"), [("fp4", False), ("fp4", True), ("int8_fp4", False)]
)


def tensors(*, dtype=torch.bfloat16, **sizes):
    """As of :func:`calls.tensors`, with channels of each operand that have a bias."""
    q, k, v = calls.tensors(**sizes, dtype=torch.float32)
    q[..., :1] += 3
    k[..., :2] += 4
    v[..., -1:] -= 2
    return [x.to(dtype) for x in (q, k, v)]


def run(q, k, v, precision="fp4", **options):
    return attention(q, k, v, precision=precision, backend=f"emulated_{precision}", **options)


def packed_operands(q, k, v, precision, *, smooth_q=True, masked=False, live=None, **call):
    """((scales of Q, codes of K and V), operands for the model), from the quantising kernels."""
    scale, causal = call.get("scale", q.shape[-1] ** -0.5), call.get("causal", False)
    q, k, v = readable(q, k, v)
    packed = pack(q, k, v, precision, live, scale, masked=masked, smooth_q=smooth_q)
    if precision == "int8_fp4":
        return int8_operands(packed, q, k)
    return fp4_operands(packed, q, k, live, smooth_q=smooth_q, causal=causal)


def int8_operands(packed, q, k):
    layout, (b, hq, nq, _), hk = packed.layout, q.shape, k.shape[1]
    blocks = packed.part("kv", torch.uint8, b, hk, layout.kv_blocks, layout.kv_block_bytes)
    kv = Int8KvCodes(*(x.cuda() for x in unpack_int8_blocks(blocks.cpu(), layout.head_dim)))
    q_scales = packed.part("q_scales", torch.float32, b, hq, nq)
    return (q_scales, kv), int8_fp4_model.Int8Operands(
        q=packed.part("q_codes", torch.int8, b, hq, nq, layout.head_dim).float(),
        q_scales=q_scales,
        k=kv.k.float().flatten(2, 3),
        k_scales=kv.k_scales[..., int8_scale_of_keys().cuda()].flatten(2),
        v=values_of(kv),
        kv_scales=packed.part("kv_scales", torch.float32, b, hk, 2),
        v_means=packed.part("v_means", torch.float32, b, hk, layout.head_dim),
        kv_len=k.shape[2],
    )


def values_of(kv):
    return fp4_model.dequantise_blocks(kv.v, kv.v_scales).movedim(2, 3).flatten(3)


def fp4_operands(packed, q, k, live, *, smooth_q, causal):
    layout, (b, hq, nq, _), hk = packed.layout, q.shape, k.shape[1]
    codes = packed.part("q_codes", torch.uint8, b, hq, nq, layout.k_dim // 2)
    blocks = packed.part("kv", torch.uint8, b, hk, layout.kv_blocks, layout.kv_block_bytes)
    kv = KvCodes(*(x.cuda() for x in unpack_blocks(blocks.cpu(), layout.head_dim)))
    q_codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    q_scales = packed.part("q_scales", torch.uint8, b, hq, nq, layout.k_dim // 16)
    delta = None
    if smooth_q:
        size = b * hq * layout.q_blocks * layout.kv_blocks
        buffer = torch.zeros(size * DELTA_BYTES, dtype=torch.uint8, device="cuda")
        heads, q_blocks = range(b * hq), range(layout.q_blocks)
        smoothed_away(packed, hq, k, live, buffer, heads=heads, q_blocks=q_blocks, causal=causal)
        pairs = buffer.view(torch.float32).view(b, hq, layout.q_blocks, layout.kv_blocks, 32, 4)
        assert torch.equal(pairs[..., :2], pairs[..., 2:])
        delta = pairs[..., :2].flatten(-2)[..., rows_of_keys().cuda()].flatten(-2)
    return (q_scales, kv), fp4_model.Operands(
        q=fp4_model.dequantise_blocks(q_codes, q_scales),
        q_factors=packed.part("q_factors", torch.float32, b, hq, layout.q_blocks, 2),
        k=fp4_model.dequantise_blocks(kv.k, kv.k_scales).flatten(2, 3),
        v=values_of(kv),
        kv_scales=packed.part("kv_scales", torch.float32, b, hk, 2),
        v_means=packed.part("v_means", torch.float32, b, hk, layout.head_dim),
        delta=delta,
        q_block_tokens=layout.q_block_tokens,
        kv_len=k.shape[2],
    )


def check(q, k, v, *, precision="fp4", mask=None, causal=False, smooth_q=True, scale=None):
    """Kernel against model on the same bytes, and kernel against exact attention; FP32 output."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = {"mask": mask, "causal": causal, "scale": scale}
    kind = {"precision": precision, "fp4": EMULATED, "smooth_q": smooth_q}
    wide = [x.float() for x in (q, k, v)]
    out = attend(*wide, **options, **kind)
    assert torch.equal(out, attend(*wide, **options, **kind))
    if not (causal and k.shape[2] > q.shape[2]) and mask is None:
        _, operands = packed_operands(
            *wide, precision, smooth_q=smooth_q, scale=scale, causal=causal
        )
        model, _ = fp4_model.attend(operands, causal=causal)
        errors = compare(out, model[..., : q.shape[-1]])
        assert errors.finite, errors
        assert errors.rel_l1 < MODEL_BAR, errors
    right = exact_attention(q, k, v, **options)
    errors = compare(out, right)
    assert errors.finite, errors
    if smooth_q or precision == "int8_fp4":
        scheme = reference_attention(*wide, scheme=SCHEMES[precision], **options)
        bar = EXACT_BAR if q.shape[2] >= FEW else EXACT_BAR_OF_FEW
        assert errors.rel_l1 < bar * compare(scheme, right).rel_l1 + 1e-4, errors
    return out


# --------------------------------------------------------------------------------------- the parts
def test_emulated_units_are_what_the_proof_wants():
    assert probe_units(torch.device("cuda", 0), EMULATED) is None


@pytest.mark.parametrize("d", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("smooth_q", [False, True])
def test_quantising_kernels_write_what_their_model_writes(d, dtype, smooth_q):
    q, k, v = tensors(b=2, hq=4, hk=2, nq=333, nk=200, d=d, dtype=dtype)
    (q_scales, kv), operands = packed_operands(q, k, v, "fp4", smooth_q=smooth_q)
    head_dim = padded_head_dim(d)
    wide = [torch.nn.functional.pad(x, (0, head_dim - d)) for x in (q, k, v)]
    codes, expected = fp4_model.quantise(
        *wide,
        scale=d**-0.5,
        q_block_tokens=TILES["fp4", head_dim, False].q_block_tokens,
        smooth_q=smooth_q,
    )
    pairs = [(q_scales, codes.q_scales), (kv.k_scales, codes.kv.k_scales)]
    pairs += [(kv.v_scales, codes.kv.v_scales)]
    pairs += [(getattr(operands, name), getattr(expected, name)) for name in ("q", "k", "v")]
    for mine, right in pairs:
        assert mine.shape == right.shape
        assert (mine != right).double().mean() < CODE_BAR
    blocks = expected.q_factors.shape[2]
    for name, mine in (
        ("q_factors", operands.q_factors[:, :, :blocks]),
        ("kv_scales", operands.kv_scales),
        ("v_means", operands.v_means),
    ):
        assert torch.allclose(mine, getattr(expected, name), rtol=1e-4, atol=1e-5), name
    if smooth_q:
        mine = operands.delta[:, :, :blocks]
        assert compare(mine, expected.delta).rel_l1 < 1e-3


@pytest.mark.parametrize("d", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_int8_quantising_kernels_write_what_their_model_writes(d, dtype):
    q, k, v = tensors(b=2, hq=4, hk=2, nq=333, nk=200, d=d, dtype=dtype)
    (_, kv), operands = packed_operands(q, k, v, "int8_fp4")
    wide = [torch.nn.functional.pad(x, (0, padded_head_dim(d) - d)) for x in (q, k, v)]
    codes, expected = int8_fp4_model.quantise(*wide, scale=d**-0.5)
    pairs = [(operands.q, expected.q), (operands.k, expected.k), (operands.v, expected.v)]
    pairs += [(kv.v_scales, codes.v_scales)]
    for mine, right in pairs:
        assert mine.shape == right.shape
        assert (mine != right).double().mean() < CODE_BAR
    for name in ("q_scales", "k_scales", "kv_scales", "v_means"):
        mine, right = getattr(operands, name), getattr(expected, name)
        assert torch.allclose(mine, right, rtol=1e-4, atol=1e-5), name


@each_precision
def test_dead_keys_take_no_part_in_means_and_scales(precision):
    q, k, v = tensors(nq=100, nk=333)
    live = random_mask(1, 1, 333)
    dead = ~live[0, 0]
    k[:, :, dead], v[:, :, dead] = 3e4, -3e4
    _, operands = packed_operands(q, k, v, precision, live=live, masked=True)
    if precision == "fp4":
        tokens = TILES["fp4", 128, True].q_block_tokens
        _, expected = fp4_model.quantise(q, k, v, scale=128**-0.5, q_block_tokens=tokens, live=live)
    else:
        _, expected = int8_fp4_model.quantise(q, k, v, scale=128**-0.5, live=live)
    assert (operands.k != expected.k).double().mean() < CODE_BAR
    assert (operands.v != expected.v).double().mean() < CODE_BAR
    assert torch.allclose(operands.kv_scales, expected.kv_scales, rtol=1e-4)


# ---------------------------------------------------------------------------------------- the grid
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@each_scheme
@pytest.mark.parametrize("causal", [False, True])
def test_every_length_up_to_257(d, precision, smooth_q, causal):
    for n in range(1, 258):
        call = tensors(nq=n, d=d, seed=n)
        check(*call, precision=precision, smooth_q=smooth_q, causal=causal)


@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("n", [1000, 4608])
@each_scheme
@pytest.mark.parametrize("causal", [False, True])
def test_long_calls(d, n, precision, smooth_q, causal):
    check(*tensors(nq=n, d=d), precision=precision, smooth_q=smooth_q, causal=causal)


@pytest.mark.parametrize("d", [64, 128])
@each_precision
def test_the_longest_calls(d, precision):
    check(*tensors(hq=1, nq=16384, d=d), precision=precision)


@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [3, 4])
@pytest.mark.parametrize("causal", [False, True])
@each_precision
def test_query_heads_share_key_heads(d, group, causal, precision):
    call = tensors(b=2, hq=2 * group, hk=2, nq=333, nk=500, d=d)
    check(*call, causal=causal, precision=precision)


@pytest.mark.parametrize("d", [8, 40, 72, 80, 100, 160, 192])
@each_precision
def test_other_head_dims_are_padded(d, precision):
    check(*tensors(nq=130, nk=333, d=d), precision=precision)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_outputs_have_the_inputs_dtype(dtype):
    q, k, v = tensors(nq=200, nk=333, dtype=dtype)
    out, wide = run(q, k, v), run(q.float(), k.float(), v.float())
    assert out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous()
    assert compare(out, wide).rel_l1 < 4e-3  # the rounding of the output


# ------------------------------------------------------------------------------------------- masks
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("nk", [333, 336])
@pytest.mark.parametrize(
    "shape", [(2, 4, 200, "k"), (2, 1, 1, "k"), (1, 4, 200, "k"), (1, 1, 200, 1)]
)
@pytest.mark.parametrize("kind", ["bool", "fp32", "bf16", "fp16"])
@each_precision
def test_masks_of_every_broadcast_form(d, nk, shape, kind, precision):
    q, k, v = tensors(b=2, hq=4, hk=2, nq=200, nk=nk, d=d)
    shape = [nk if size == "k" else size for size in shape]
    check(q, k, v, mask=mask_of_kind(kind, *shape), precision=precision)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@each_precision
def test_the_masked_kernel_agrees_with_its_model(kind, precision):
    q, k, v = (x.float() for x in tensors(hq=4, hk=2, nq=200, nk=333))
    mask = random_mask(1, 4, 200, 333)
    mask[:, :, 9] = False
    if kind == "additive":
        mask = torch.randn(mask.shape, device="cuda").masked_fill(~mask, -torch.inf)
    _, operands = packed_operands(q, k, v, precision, masked=True)
    model, model_lse = fp4_model.attend(operands, causal=False, mask=mask)
    options = {"scale": 128**-0.5, "causal": False, "fp4": EMULATED, "return_lse": True}
    out, lse = attend(q, k, v, mask=mask, precision=precision, **options)
    assert compare(out, model).rel_l1 < MODEL_BAR
    assert (out[:, :, 9] == 0).all()
    assert (lse[:, :, 9] == -torch.inf).all()
    k_mean = k.mean(2, keepdim=True)
    if precision == "int8_fp4":
        k_mean = sampled_mean(k, torch.ones(k.shape[:3], dtype=torch.bool, device="cuda"))
    k_mean = k_mean.repeat_interleave(2, 1)
    seen = lse.isfinite()
    taken = (q * k_mean).sum(-1) * 128**-0.5
    assert (lse - taken - model_lse)[seen].abs().max() < 1e-2


@pytest.mark.parametrize(("nq", "nk"), [(512, 512), (300, 700), (700, 300), (1, 40), (129, 129)])
@each_precision
def test_causal_calls_of_unequal_lengths(nq, nk, precision):
    check(*tensors(nq=nq, nk=nk), causal=True, precision=precision)


@each_precision
def test_causal_and_masked(precision):
    q, k, v = tensors(b=2, hq=4, hk=2, nq=300, nk=336)
    check(q, k, v, mask=random_mask(2, 1, 300, 336), causal=True, precision=precision)


# --------------------------------------------------------------------------------- memory, numbers
def test_pieces_give_the_same_bits_as_one_launch(monkeypatch):
    given = tensors(b=2, hq=4, hk=2, nq=1000, nk=700)
    expected = [run(*given, causal=causal) for causal in (False, True)]
    for limit in (1, 1 << 15, 1 << 17):
        monkeypatch.setattr(sm120_fp4, "MOST_DELTA_BYTES", limit)
        for causal in (False, True):
            assert torch.equal(run(*given, causal=causal), expected[causal])


def test_long_calls_take_no_memory_that_grows_with_the_square_of_their_length():
    given = tensors(hq=4, nq=32768, d=64)
    run(*given)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*given)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 3 * sum(x.nbytes for x in given) + sm120_fp4.MOST_DELTA_BYTES


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-6])
@each_precision
def test_any_scale(scale, precision):
    check(*tensors(nq=300), scale=scale, precision=precision)


@pytest.mark.parametrize("c", [1e-4, 1e-3, 1e3, 1e4])
@each_precision
def test_results_scale_as_their_operands_do(c, precision):
    q, k, v = (x.float() for x in tensors(nq=500))
    base = run(q, k, v, precision)
    noise = compare(base, exact_attention(q, k, v)).rel_l1
    assert compare(run(q, k, v * c, precision) / c, base).rel_l1 < 0.1 * noise
    assert compare(run(q * c, k / c, v, precision), base).rel_l1 < 0.1 * noise


@each_precision
def test_channels_that_carry_the_keys_cost_nothing(precision):
    """QA-04: two channels of K x 30, of Q / 30."""
    q, k, v = (x.float() for x in calls.tensors(nq=500, dtype=torch.float32))
    plain = compare(run(q, k, v, precision), exact_attention(q, k, v)).rel_l1
    q[..., [3, 50]] /= 30
    k[..., [3, 50]] *= 30
    errors = compare(run(q, k, v, precision), exact_attention(q, k, v))
    assert errors.rel_l1 < 1.15 * plain, errors


# --------------------------------------------------------------------------------- which one runs
@pytest.mark.parametrize("backend", [EMULATED_FP4, EMULATED_INT8_FP4], ids=lambda b: b.name)
def test_the_emulation_is_chosen_by_name_alone(backend):
    assert backend.unasked is None
    assert explain(*tensors(), precision=backend.precisions[0]).backend != backend.name


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 12,
    reason="needs a GPU with FP4 units (compute capability 12.x)",
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@each_precision
def test_native_units_and_kernels_prove_themselves(head_dim, precision):
    assert probe_units(torch.device("cuda", 0), NATIVE) is None
    assert prove(precision, torch.device("cuda", 0), head_dim, torch.bfloat16) is None
