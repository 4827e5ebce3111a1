"""How a call is cut so that memory stays bounded: slices of batch and heads, tiles of queries."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .visibility import Visibility, without_expanded_dims

# Elements of one tile of scores over the heads of a slice: within a CPU's cache, wide on a GPU.
TILE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
# Elements of q, k and v of one slice: bounds the FP32 copies that preparation makes.
SLICE_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}


class Slice(NamedTuple):
    """Some batch items and key heads of a call, with the query heads that read them."""

    batch: slice
    key_heads: slice
    group: int  # query heads per key head

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        """[B, Hk, ...] of this slice, a view."""
        return x[self.batch, self.key_heads]

    def of_queries(self, x: torch.Tensor) -> torch.Tensor:
        """[B, Hk, G, ...] of this slice, a view of ``x`` [B, Hq, ...]."""
        return x.unflatten(1, (-1, self.group))[self.batch, self.key_heads]

    def of_mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """[B|1, Hk|1, G|1, Nq|1, Nk|1] of this slice, a view."""
        if mask is None:
            return None
        mask = without_expanded_dims(mask[(None,) * (4 - mask.ndim)])
        mask = mask.unflatten(1, (-1, self.group) if mask.shape[1] > 1 else (1, 1))
        batch = self.batch if mask.shape[0] > 1 else slice(None)
        key_heads = self.key_heads if mask.shape[1] > 1 else slice(None)
        return mask[batch, key_heads]

    def visibility(self, q, k, mask: torch.Tensor | None, causal: bool) -> Visibility:
        return Visibility(self.of_mask(mask), causal, q.shape[2], k.shape[2])


def slices(q: torch.Tensor, k: torch.Tensor, block_q: int, block_k: int) -> Iterator[Slice]:
    """Slices of q [B, Hq, Nq, D] and k [B, Hk, Nk, D] that a device takes at a time."""
    batch, heads = k.shape[:2]
    group = q.shape[1] // heads
    scores = group * min(q.shape[2], block_q) * min(k.shape[2], block_k)
    values = (group * q.shape[2] + 2 * k.shape[2]) * q.shape[3]
    device = q.device.type
    fit = max(1, min(TILE_ELEMENTS[device] // scores, SLICE_ELEMENTS[device] // values))
    heads_step = min(heads, fit)
    batch_step = max(1, fit // heads)
    for b in range(0, batch, batch_step):
        for h in range(0, heads, heads_step):
            yield Slice(slice(b, b + batch_step), slice(h, h + heads_step), group)


def row_tiles(q: torch.Tensor, block_q: int, block_k: int) -> Iterator[tuple[int, int, int]]:
    """Tiles (first row, end row, equal blocks) of q [B, Hk, G, Nq, D]; the last may be ragged."""
    rows = q.shape[-2]
    whole = rows - rows % block_q
    block_elements = q[..., 0, 0].numel() * block_q * block_k
    step = block_q * max(1, TILE_ELEMENTS[q.device.type] // block_elements)
    for start in range(0, whole, step):
        end = min(start + step, whole)
        yield start, end, (end - start) // block_q
    if whole < rows:
        yield whole, rows, 1
