"""NVFP4 blocks of K and V: packing, and what lanes of the tensor core read at their addresses."""

import pytest
import torch
from sageattention3.kernels.launch import fp4_quantise, geometry, sm120_fp4
from sageattention3.kernels.reference.fp4_layout import (
    BLOCK_KEYS,
    KvCodes,
    block_bytes,
    k_dim,
    pack_blocks,
    rows_of_keys,
    unpack_blocks,
)

HEAD_DIMS = [64, 96, 128, 256]


@pytest.fixture(params=HEAD_DIMS)
def codes(request):
    """Three blocks of random codes; head_dim is that of v."""
    generator = torch.Generator().manual_seed(request.param)
    head_dim, channels = request.param, k_dim(request.param)

    def random(high, *shape):
        return torch.randint(high, (3, *shape), generator=generator, dtype=torch.uint8)

    return KvCodes(
        random(16, BLOCK_KEYS, channels),
        random(127, BLOCK_KEYS, channels // 16),
        random(16, head_dim, BLOCK_KEYS),
        random(127, head_dim, BLOCK_KEYS // 16),
    )


def head_dim_of(codes: KvCodes) -> int:
    return codes.v.shape[-2]


def nibbles(some_bytes) -> list[int]:
    return [half for byte in some_bytes.tolist() for half in (byte & 15, byte >> 4)]


def ldmatrix_row(lane: int) -> int:
    """Byte that lane ``lane`` adds to the address of 16 rows: panels.cuh."""
    row, byte = lane % 8 + lane // 16 * 8, lane // 8 % 2 * 16
    return row * 32 + (byte ^ ((row & 4) << 2))


def test_packing_is_undone_by_unpacking(codes):
    packed = pack_blocks(codes)
    assert packed.shape == (3, block_bytes(head_dim_of(codes)))
    for there, back in zip(codes, unpack_blocks(packed, head_dim_of(codes)), strict=True):
        assert torch.equal(there, back)


def test_rows_are_a_permutation_within_each_32_keys():
    rows = rows_of_keys()
    assert torch.equal(rows.sort().values, torch.arange(BLOCK_KEYS))
    assert torch.equal(rows // 32, torch.arange(BLOCK_KEYS) // 32)


def test_a_lane_owns_eight_neighbouring_keys_of_each_32():
    """Scores of column 2t + e of tile n lie in lane t: eight of them must be neighbours."""
    key_in_row = rows_of_keys().argsort()
    for t in range(4):
        for half in range(2):
            rows = [32 * half + 8 * j + 2 * t + e for j in range(4) for e in range(2)]
            assert key_in_row[rows].tolist() == list(
                range(32 * half + 8 * t, 32 * half + 8 * t + 8)
            )


def test_lanes_find_the_operands_of_the_product_with_k(codes):
    head_dim, block = head_dim_of(codes), pack_blocks(codes)[1]
    channels, key_in_row = k_dim(head_dim), rows_of_keys().argsort()
    scales_at = channels * 32 + head_dim * 32
    for n in range(0, 8, 2):
        for step in range(channels // 64):
            for lane in range(32):  # rows of ldmatrix: 16 bytes each
                row = 8 * n + lane % 8 + lane // 16 * 8
                first = step * 64 + lane // 8 % 2 * 32
                at = step * (64 * 32) + n * (8 * 32) + ldmatrix_row(lane)
                wanted = codes.k[1, key_in_row[row], first : first + 32]
                assert nibbles(block[at : at + 16]) == wanted.tolist()
    for group in range(2):  # lane 4g + t supplies column g of tile t of four
        for g in range(8):
            for t in range(4):
                row = 32 * group + 8 * t + g
                at = scales_at + row * (channels // 16)
                wanted = codes.k_scales[1, key_in_row[row]]
                assert torch.equal(block[at : at + channels // 16], wanted)


def test_lanes_find_the_operands_of_the_product_with_v(codes):
    head_dim, block = head_dim_of(codes), pack_blocks(codes)[2]
    channels = k_dim(head_dim)
    codes_at, scales_at = channels * 32, channels * 32 + head_dim * 32 + 64 * channels // 16
    for n in range(0, head_dim // 8, 2):
        for lane in range(32):
            channel, first = 8 * n + lane % 8 + lane // 16 * 8, lane // 8 % 2 * 32
            at = codes_at + n * (8 * 32) + ldmatrix_row(lane)
            assert nibbles(block[at : at + 16]) == codes.v[2, channel, first : first + 32].tolist()
    for channel in range(head_dim):
        at = scales_at + channel * 4
        assert torch.equal(block[at : at + 4], codes.v_scales[2, channel])


def test_eight_neighbouring_rows_of_a_panel_cover_all_banks():
    for byte in (0, 16):
        starts = [row * 32 + (byte ^ ((row & 4) << 2)) for row in range(8)]
        banks = {start // 4 % 32 + word for start in starts for word in range(4)}
        assert len(banks) == 32


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_launcher_lays_out_blocks_of_the_same_size(head_dim, monkeypatch):
    monkeypatch.setattr(geometry, "_multiprocessors", lambda device: 170)
    layout = fp4_quantise.lay_out.__wrapped__(2, 6, 3, 100, 333, head_dim, 96, None)
    assert layout.kv_block_bytes == block_bytes(head_dim)
    assert layout.kv_blocks == 6
    assert layout.k_dim == k_dim(head_dim)
    assert layout.q_blocks % fp4_quantise.Q_BLOCKS == 0
    assert layout.q_blocks * 96 >= 100


@pytest.mark.parametrize(
    ("heads", "row_blocks", "bytes_each"),
    [(1, 1, 0), (24, 24, 1 << 17), (3, 1000, 1 << 20), (5, 7, 1 << 23), (2, 3, 1 << 30)],
)
def test_pieces_cover_every_block_of_rows_once_within_the_memory_bound(
    heads, row_blocks, bytes_each
):
    pieces = list(sm120_fp4.cut(heads, row_blocks, bytes_each))
    blocks = [(h, r) for piece in pieces for h in piece.heads for r in piece.row_blocks]
    assert blocks == [(h, r) for h in range(heads) for r in range(row_blocks)]
    for piece in pieces:
        count = len(piece.heads) * len(piece.row_blocks)
        assert count == 1 or count * bytes_each <= sm120_fp4.MOST_DELTA_BYTES


def test_one_call_without_scores_to_keep_is_one_piece():
    assert list(sm120_fp4.cut(48, 100, 0)) == [(range(48), range(100))]
