"""The arithmetic of the proof of FP4 units, against the emulated product spelt out lane by lane."""

import pytest
import torch
from sageattention3.kernels.launch import fp4_proof
from sageattention3.kernels.reference.formats import decode_e2m1


@pytest.fixture(scope="module")
def operands():
    return fp4_proof.probe_operands(torch.Generator().manual_seed(3))


def nibbles(word: int) -> torch.Tensor:
    return decode_e2m1(torch.tensor([(word >> (4 * i)) & 15 for i in range(8)])).double()


def e4m3(word: int, byte: int) -> float:
    code = torch.tensor([(word >> (8 * byte)) & 0x7F], dtype=torch.uint8)
    return code.view(torch.float8_e4m3fn).double().item()


def emulate(words, a_pair: int, b_lane: int) -> torch.Tensor:
    """EmulatedFp4 of fp4_mma.cuh: [32, 4] from registers, by products of [16, 16] x [16, 8]."""
    a, b, scales = (x.tolist() for x in words)
    d = torch.zeros(16, 8, dtype=torch.double)
    for half in range(2):
        for part in range(2):  # which of a word's two pairs of FP16 pairs
            left = torch.zeros(16, 16, dtype=torch.double)
            right = torch.zeros(16, 8, dtype=torch.double)
            for lane in range(32):
                g, t, quad = lane // 4, lane % 4, lane & ~3
                byte = 2 * half + lane // 2 % 2
                rows = [nibbles(a[lane][2 * half + r]) for r in range(2)]
                rows[0] = rows[0] * e4m3(scales[0][quad + 2 * a_pair], byte)
                rows[1] = rows[1] * e4m3(scales[0][quad + 2 * a_pair + 1], byte)
                column = nibbles(b[lane][half]) * e4m3(scales[1][quad + b_lane], byte)
                for slot, first in ((2 * t, 4 * part), (8 + 2 * t, 4 * part + 2)):
                    left[g, slot : slot + 2] = rows[0][first : first + 2]
                    left[g + 8, slot : slot + 2] = rows[1][first : first + 2]
                    right[slot : slot + 2, g] = column[first : first + 2]
            d += left @ right
    lane, i = torch.arange(32)[:, None], torch.arange(4)
    return d[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]


@pytest.mark.parametrize("a_pair", range(2))
@pytest.mark.parametrize("b_lane", range(4))
def test_the_emulated_product_is_the_product_of_operands_and_scales(operands, a_pair, b_lane):
    right, terms = fp4_proof.lane_products(*operands)
    mine = emulate(fp4_proof.lane_words(*operands), a_pair, b_lane)
    assert torch.allclose(mine, right[a_pair, b_lane], rtol=0, atol=1e-9)
    assert (right.abs() <= terms).all()


def test_selectors_and_lanes_make_a_difference(operands):
    right, terms = fp4_proof.lane_products(*operands)
    flat = right.flatten(0, 1)
    for i in range(8):
        for j in range(i):
            assert ((flat[i] - flat[j]).abs() > fp4_proof._PRODUCT_ERROR * terms[0, 0]).any()
