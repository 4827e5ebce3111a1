"""SageBwd on wgmma, interpreted: its shapes."""

from functools import partial

import pytest
import torch
from sageattention3.kernels.launch import geometry, sm90_sagebwd
from sageattention3.kernels.metrics import compare
from sageattention3.kernels.reference import exact_attention

from . import sagebwd_calls
from .calls import in_any_order
from .ptx import KernelError
from .sagebwd_calls import gradients, tensors
from .simulator import Simulator

run = partial(sagebwd_calls.gradients, sm90_sagebwd.train)
check = partial(sagebwd_calls.check, sm90_sagebwd.train)


@pytest.fixture(autouse=True)
def simulator(use):
    return use(Simulator(90))


@pytest.mark.parametrize("d", [40, 64, 104, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_head_dim_in_both_dtypes(d, dtype):
    check(*tensors(d=d, dtype=dtype))


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (64, 129), (65, 64), (130, 130), (20, 150)])
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_ends(nq, nk, causal):
    check(*tensors(nq=nq, nk=nk), causal=causal)


def test_causal_with_128_channels():
    check(*tensors(hq=1, nq=140, nk=140, d=128), causal=True)


def test_more_tiles_than_stages():
    check(*tensors(hq=1, nq=330, nk=330, d=128))


def test_queries_share_key_heads():
    q, k, v, d_out = tensors(hq=6, hk=2)
    check(q, k + torch.arange(2)[:, None, None], v, d_out)  # a wrong head shows at once


def test_keys_that_are_hidden_from_a_query_leak_nothing_into_it():
    q, k, v, d_out = tensors(hq=1, nq=100, nk=100, d=128)
    d_out[:, :, 70:] = 0  # dS of later queries would reach into the scales of this one's
    clean = run(q, k, v, d_out, causal=True)
    v[:, :, 70:] = v[:, :, 70:].flip(2)  # V's ranges, which its codes share, stay as they are
    dirty = run(q, k, v, d_out, causal=True)
    assert torch.equal(clean[0][:, :, :70], dirty[0][:, :, :70])
    assert not torch.equal(clean[0][:, :, 70:], dirty[0][:, :, 70:])
    assert torch.equal(clean[1], dirty[1])
    assert clean[1][:, :, :70].abs().amax(3).all()


def check_small_queries(d):
    q, k, v, d_out = tensors(hq=1, nq=70, nk=130, d=d)
    q[:, :, 1:64:4] *= 1e-3
    q[:, :, 2:64:4] = 0
    mine = check(q, k, v, d_out)[1]
    right = gradients(exact_attention, *(x.double() for x in (q, k, v, d_out)))[1]
    for x, y in zip(mine[0, 0], right[0, 0], strict=True):
        error = compare(x, y)
        assert error.rel_l1 <= 0.1
        assert error.cosine >= 0.99


@pytest.mark.parametrize("d", [64, 128])
def test_small_queries_beside_large_ones_have_gradients_of_their_own(d):
    check_small_queries(d)


def test_queries_that_are_all_zeros_have_gradients():
    q, k, v, d_out = tensors(dtype=torch.float16)
    check(torch.zeros_like(q), k, v, d_out)


def test_chunks_cover_every_tile_once(monkeypatch):
    one_head = 100 * 1000
    sizes = {
        10 * one_head: [7],
        3 * one_head: [3, 3, 1],
        one_head: [1] * 7,
        one_head // 2: [1] * 14,
        1: [1] * 7 * 13,  # 4 multiprocessors with two tiles each
    }
    for limit, heads in sizes.items():
        monkeypatch.setattr(sm90_sagebwd, "LIMIT", limit)
        chunks = sm90_sagebwd._chunks(7, 100, 1000, 0)
        assert [chunk.heads for chunk in chunks] == heads
        assert all(chunk.first_tile % 2 == chunk.tiles % 2 == 0 for chunk in chunks)
        covered = [
            (head, tile)
            for chunk in chunks
            for head in range(chunk.first_head, chunk.first_head + chunk.heads)
            for tile in range(chunk.first_tile, chunk.first_tile + chunk.tiles)
        ]
        assert covered == [(head, tile) for head in range(7) for tile in range(100)]


@pytest.mark.parametrize(
    ("b", "hq", "hk", "nq", "nk", "d", "causal"),
    [(1, 6, 3, 70, 330, 64, False), (3, 1, 1, 270, 270, 128, True)],
)
def test_chunks_of_heads_and_of_keys_give_the_same_bits(b, hq, hk, nq, nk, d, causal, monkeypatch):
    given = tensors(hq=hq, hk=hk, nq=nq, nk=nk, d=d)
    given = [torch.cat([x * (i + 1) for i in range(b)]) for x in given]
    head = hq // hk * -(-nq // 64) * 6 * sm90_sagebwd._DS_BYTES
    expected = check(*given, causal=causal)
    monkeypatch.setattr(geometry, "_multiprocessors", lambda device: 1)
    for limit in (2 * head, head, 1):  # two chunks; three; three of three ranges of keys each
        monkeypatch.setattr(sm90_sagebwd, "LIMIT", limit)
        found = run(*given, causal=causal)
        assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


@pytest.mark.parametrize("d", [64, 128])
def test_warps_may_come_in_any_order(simulator, d):
    given = tensors(hq=1, nq=150, nk=140, d=d)
    in_any_order(simulator, range(4), lambda: run(*given))


FAULTS = {
    "rows of tiles are in another order": (
        "int8_layout.cuh",
        "8 * j + 2 * t + e",
        "8 * t + 2 * j + e",
    ),
    "panels are not swizzled": (
        "panels.cuh",
        "row * 32 + (byte ^ ((row & 4) << 2))",
        "row * 32 + byte",
    ),
    "rows of A change places": (
        "sagebwd_group_products.cuh",
        "{rows[0][2 * step], rows[1][2 * step],",
        "{rows[1][2 * step], rows[0][2 * step],",
    ),
    "a row has the other one's weight": (
        "sagebwd_group_products.cuh",
        "weight[i / 2 % 2]",
        "weight[i % 2]",
    ),
    "a row is taken for another key": (
        "sagebwd_group.cuh",
        "quad_of_warp() / 2 * 4 + 2 * r",
        "quad_of_warp() / 2 * 4 + 2 * (1 - r)",
    ),
    "a tile is given back before its last product has ended": (
        "sagebwd_group_products.cuh",
        "  if constexpr (PARTS == 2) multiply",
        "  ring.empty(turn.stage).arrive();\n  if constexpr (PARTS == 2) multiply",
    ),
    "dP is read before its product has ended": (
        "sm90_sagebwd_key_gradients.cu",
        "    wgmma_wait<0>();\n    pin(d_p);\n    wgmma_begin",
        "    wgmma_begin",
    ),
    "tiles are read before they have come": (
        "sagebwd_group_products.cuh",
        "  ring.full(next.stage).wait(next.parity);\n",
        "",
    ),
    "the last key is hidden": (
        "sm90_sagebwd_key_gradients.cu",
        "token < kv_len",
        "token + 1 < kv_len",
    ),
    "weights of dS lack the scales of K": (
        "sm90_sagebwd_key_gradients.cu",
        "{weight[0] * k_scale, weight[1] * k_scale}",
        "{weight[0], weight[1]}",
    ),
    "dS stays as keys hold it": (
        "sagebwd_group_ds.cuh",
        "transpose_16bit(words[2 * pair])",
        "words[2 * pair]",
    ),
    "dS has the weights of other keys": ("sagebwd_group_ds.cuh", "weights + 8 * 2", "weights"),
    "dS is another consumer's": (
        "sm90_sagebwd_query_gradient.cu",
        "stage + NUMBERS + consumer()",
        "stage + NUMBERS + (2 - consumer())",
    ),
    "dS is of another tile of queries": (
        "sm90_sagebwd_key_gradients.cu",
        "? 1 + first_tile : 1)",
        "? 1 : 1)",
    ),
    "dS is read before it has come": (
        "sm90_sagebwd_query_gradient.cu",
        "    ring.full(turn.stage).wait(turn.parity);\n",
        "",
    ),
    "dS is given back before its product has ended": (
        "sm90_sagebwd_query_gradient.cu",
        "    if (i < own_turns) {\n",
        "    ring.empty(turn.stage).arrive();\n    if (i < own_turns) {\n",
    ),
    "dQ is read before its product has ended": (
        "sm90_sagebwd_query_gradient.cu",
        "      wgmma_wait<0>();\n",
        "",
    ),
    "dQ forgets the keys of earlier chunks": (
        "sm90_sagebwd_query_gradient.cu",
        "p.chunk.first_tile > 0",
        "false",
    ),
    "codes of small queries keep their scale": (
        "sm90_sagebwd_prepare.cu",
        "ratio = q_scale / scale",
        "ratio = 1.0f",
    ),
    "small queries keep their scale in dS": (
        "sm90_sagebwd_prepare.cu",
        "max_nan(own, largest * LARGEST_OF_OTHERS)",
        "own",
    ),
    "dP lacks its offset": ("sm90_sagebwd_prepare.cu", "= -delta * slope", "= 0.0f"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, use, monkeypatch):
    use(Simulator(90, edit=FAULTS[fault]))

    def check_few_keys_small_queries_and_more_tiles_than_stages():
        check(*tensors(hq=1, nq=70, nk=9))
        check_small_queries(64)
        check(*tensors(nq=200, nk=200), causal=True)
        check(*tensors(hq=1, nq=500, nk=600))
        monkeypatch.setattr(sm90_sagebwd, "LIMIT", 1)
        check(*tensors(hq=1, nq=70, nk=600))

    with pytest.raises((AssertionError, KernelError)):
        check_few_keys_small_queries_and_more_tiles_than_stages()
