"""What a GPU's FP4 units must show before FP4 attention may use them.

Kernel and emulation share one reading of NVIDIA's documents about which lane holds what. So the
units themselves are compared with plain arithmetic first, then the native kernel with the emulated
one on the same quantised operands, where they may differ by the rounding of sums alone.
"""

import torch

from ..backend import token_major_like
from ..jit.loader import launch
from ..jit.variants import Variant
from ..metrics import compare
from ..reference.formats import decode_e2m1, round_e2m1
from .sm120_fp4 import EMULATED, NATIVE, gpus_of, launch_attention, pack

# Of the sum of a product's absolute terms: FP32 sums of exact terms, in any order and rounding.
_PRODUCT_ERROR = 2.0**-20
# Relative L1 between the kernels: a sum's rounding now and then moves a code of P.
_KERNEL_ERROR = 1e-3


def _probe(fp4: str) -> Variant:
    return Variant(
        source="sm120_fp4_probe.cu",
        kernel="sm120_fp4_probe",
        template=(fp4,),
        params="6Q",
        threads=32,
        **gpus_of(fp4, needed=True),
    )


_PROBES = {fp4: _probe(fp4) for fp4 in (NATIVE, EMULATED)}
VARIANTS = tuple(_PROBES.values())


def prove(precision: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the native kernel of ``precision`` (fp4, int8_fp4) must not be used on ``device``.

    A clause; None if it may.
    """
    wrong = probe_units(device, NATIVE)
    return wrong or _compare_kernels(precision, device, head_dim, dtype)


def probe_units(device: torch.device, fp4: str) -> str | None:
    """What is wrong with block-scaled products or with rounding to E2M1; None if nothing is."""
    generator = torch.Generator().manual_seed(0)
    a, b, scales = probe_operands(generator)
    # Every tie and its neighbours, both signs, and beyond the largest value.
    grid = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 1e3])
    infinity = torch.full_like(grid, torch.inf)
    x = torch.stack([grid, grid.nextafter(infinity), grid.nextafter(-infinity), grid / 3])
    x = torch.cat([x, -x]).flatten().repeat(2)
    words = [*lane_words(a, b, scales), x]
    a_words, b_words, scale_words, x_words = (y.to(device) for y in words)
    products = torch.full((2, 4, 32, 4), torch.nan, device=device)
    codes = torch.zeros(32, dtype=torch.int32, device=device)
    pointers = (y.data_ptr() for y in (a_words, b_words, scale_words, x_words, products, codes))
    launch(_PROBES[fp4], device.index or 0, 1, *pointers)

    right, terms = lane_products(a, b, scales)
    off = (products.cpu().double() - right).abs()
    if not (off <= _PRODUCT_ERROR * terms).all():
        return "its FP4 products are not what their operands and scales give"
    nibbles = codes.cpu()[:, None] >> (4 * torch.arange(8, dtype=torch.int32)) & 15
    if not torch.equal(decode_e2m1(nibbles.flatten()), round_e2m1(x)):
        return "it rounds to E2M1 otherwise than to the nearest, ties to even"
    return None


def probe_operands(generator: torch.Generator):
    """Random codes: A [16, 64], B [64, 8], scales [2 A_PAIR, 16, 4] and [4 B_LANE, 8, 4]."""
    a = torch.randint(16, (16, 64), generator=generator)
    b = torch.randint(16, (64, 8), generator=generator)
    sfa = torch.randint(1, 0x7F, (2, 16, 4), generator=generator)
    sfb = torch.randint(1, 0x7F, (4, 8, 4), generator=generator)
    return a, b, (sfa, sfb)


def lane_words(a: torch.Tensor, b: torch.Tensor, scales) -> tuple[torch.Tensor, ...]:
    """Registers of each lane as fp4_mma.cuh describes them, int32: [32, 4], [32, 2], [2, 32]."""
    sfa, sfb = scales
    g, t = torch.arange(32) // 4, torch.arange(32) % 4
    eight = 8 * t[:, None] + torch.arange(8)
    a_words = [a[(g + 8 * (r % 2))[:, None], 32 * (r // 2) + eight] for r in range(4)]
    b_words = [b[32 * r + eight, g[:, None]] for r in range(2)]
    scale_words = [sfa[t // 2, g + 8 * (t % 2)], sfb[t, g]]
    return (
        _pack(torch.stack(a_words, 1), 4),
        _pack(torch.stack(b_words, 1), 4),
        _pack(torch.stack(scale_words), 8),
    )


def lane_products(a, b, scales) -> tuple[torch.Tensor, torch.Tensor]:
    """What each lane must find, FP64 [2, 4, 32, 4], and the sums of its absolute terms."""
    sfa, sfb = ((x.to(torch.uint8).view(torch.float8_e4m3fn).double()) for x in scales)
    x = decode_e2m1(a).double() * sfa.repeat_interleave(16, -1)  # [2, 16, 64]
    y = decode_e2m1(b).double() * sfb.repeat_interleave(16, -1).mT  # [4, 64, 8]
    g, t, i = torch.arange(32)[:, None] // 4, torch.arange(32)[:, None] % 4, torch.arange(4)
    row, column = g + 8 * (i // 2), 2 * t + i % 2
    products = x[:, None] @ y, x.abs()[:, None] @ y.abs()
    right, terms = (z[:, :, row, column] for z in products)
    return right, terms


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    words = (codes << (bits * torch.arange(codes.shape[-1]))).sum(-1)
    return (words - (words >> 31 << 32)).to(torch.int32)


def _compare_kernels(
    precision: str, device: torch.device, head_dim: int, dtype: torch.dtype
) -> str | None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, heads, tokens, -(-head_dim // 8) * 8, generator=generator).to(device, dtype)
        for heads, tokens in ((4, 300), (2, 333), (2, 333))
    )
    mask = torch.rand(300, 333, generator=generator).to(device).expand(1, 4, -1, -1) < 0.5
    for name, causal, seen in (
        ("plain", False, None),
        ("causal", True, None),
        ("masked", False, mask),
    ):
        smooth_q = precision == "fp4"
        masked = seen is not None
        packed = pack(q, k, v, precision, None, head_dim**-0.5, masked=masked, smooth_q=smooth_q)
        outs = {}
        for fp4 in (NATIVE, EMULATED):
            outs[fp4] = token_major_like(q)
            options = {"precision": precision, "fp4": fp4, "smooth_q": smooth_q}
            launch_attention(packed, q, k, seen, None, causal, outs[fp4], None, **options)
        error = compare(outs[NATIVE], outs[EMULATED])
        if not error.finite or error.rel_l1 > _KERNEL_ERROR:
            return f"its {name} call is a relative L1 of {error.rel_l1:.1e} off its emulation"
    return None
