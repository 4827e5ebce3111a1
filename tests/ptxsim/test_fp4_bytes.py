"""FP4 attention, interpreted, against its model on the bytes that quantising kernels wrote.

So no rounding of a code stands between them, and the bar is that of tests/gpu/test_fp4.py.
"""

import pytest
import torch
from sageattention3.kernels.launch.fp4_quantise import DELTA_BYTES, smoothed_away
from sageattention3.kernels.launch.operands import readable
from sageattention3.kernels.launch.sm120_fp4 import attend, pack
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import fp4_model
from sageattention3.kernels.reference.fp4_layout import rows_of_keys, unpack_blocks

from .calls import in_any_order, token_major
from .simulator import Simulator

MODEL_BAR = 1e-3


def packed_operands(q, k, v, *, smooth_q, causal):
    """Operands for the model, from what the quantising kernels wrote."""
    scale = q.shape[-1] ** -0.5
    q, k, v = readable(q, k, v)
    packed = pack(q, k, v, "fp4", None, scale, masked=False, smooth_q=smooth_q)
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
        smoothed_away(packed, hq, k, None, pairs, heads=heads, q_blocks=q_blocks, causal=causal)
        assert torch.equal(pairs[..., :2], pairs[..., 2:])
        delta = pairs[..., :2].flatten(-2)[..., rows_of_keys()].flatten(-2)
    return fp4_model.Operands(
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


@pytest.mark.parametrize(
    ("d", "nq", "nk", "causal", "smooth_q"),
    [
        (64, 17, 65, False, True),
        (64, 140, 300, False, True),
        (64, 130, 130, True, True),
        (40, 70, 333, False, False),
        (128, 40, 129, False, True),
        (256, 20, 70, False, True),
    ],
)
def test_attention_computes_what_its_model_does_on_the_same_bytes(use, d, nq, nk, causal, smooth_q):
    simulator = use(Simulator(120))
    q, k, v = token_major((4, nq), (2, nk), (2, nk), d=d)
    k[..., :2] += 4
    options = {"mask": None, "scale": d**-0.5, "causal": causal, "smooth_q": smooth_q}
    out = in_any_order(simulator, (0, 1, 2), lambda: attend(q, k, v, **options))
    operands = packed_operands(q, k, v, smooth_q=smooth_q, causal=causal)
    model, _ = fp4_model.attend(operands, causal=causal)
    errors = compare(out, model[..., :d])
    assert errors.finite, errors
    assert errors.rel_l1 < MODEL_BAR, errors
