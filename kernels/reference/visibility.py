"""Who sees whom: masks and causality, applied tile by tile and read for keys that nobody sees."""

import torch

# A bias this far below its row's largest hides the key: no score of a trained model bridges it,
# and every dtype's -finfo.max (fp16: -65504) is beyond it.
HIDDEN_BELOW = 3e4


class Visibility:
    """Mask and causality of one slice of a call, as seen by scores [B, Hk, G, Nq, Nk].

    mask: None, bool (True = attend) or additive, [B|1, Hk|1, G|1, Nq|1, Nk|1].
    causal: query i sees key j where j <= i (as in torch's scaled_dot_product_attention).
    """

    def __init__(self, mask: torch.Tensor | None, causal: bool, nq: int, nk: int):
        self.mask, self.causal, self.nq, self.nk = mask, causal, nq, nk

    def last_key(self, row_end: int) -> int:
        """One past the last key that rows before ``row_end`` may see."""
        return min(row_end, self.nk) if self.causal else self.nk

    def hide(self, scores: torch.Tensor, row: int, col: int) -> torch.Tensor:
        """Add the bias to the tile of scores that starts at (row, col); hidden keys get -inf."""
        rows, cols = scores.shape[-2:]
        if self.mask is not None:
            tile = _narrow(_narrow(self.mask, -2, row, rows), -1, col, cols)
            if tile.dtype == torch.bool:
                scores = scores.masked_fill(~tile, -torch.inf)
            else:
                scores = scores + _as_float32(tile)
        if self.causal and col + cols > row + 1:
            scores = scores.masked_fill(_future(scores, row, col), -torch.inf)
        return scores

    def live_keys(self, device: torch.device) -> torch.Tensor | None:
        """Bool [B|1, Hk|1, 1, Nk, 1]: keys that some query sees; None if all are.

        The others take no part in any mean, maximum or scale, so that their values cannot matter.
        """
        live = None
        if self.mask is not None:
            live = self._unhidden().any(-2).any(-2).expand(-1, -1, self.nk)[:, :, None, :, None]
        if self.causal and self.nk > self.nq:
            reached = torch.arange(self.nk, device=device)[:, None] < self.nq
            live = reached.expand(1, 1, 1, -1, 1) if live is None else live & reached
        return live

    def _unhidden(self) -> torch.Tensor:
        mask = self.mask
        per_query = mask.shape[-2] > 1
        if mask.dtype == torch.bool:
            return self._past(mask) if self.causal and per_query else mask
        bias = _as_float32(mask)
        if self.causal and per_query:
            bias = bias.masked_fill(
                ~self._past(torch.ones_like(bias, dtype=torch.bool)), -torch.inf
            )
        if self.causal and not per_query:
            highest = bias.cummax(-1).values  # of the keys that the first query to see j sees
        else:
            highest = bias.amax(-1, keepdim=True)
        # Not ">": beside a row maximum of -finfo.max the 3e4 is lost, and all such keys are seen.
        return (bias >= highest - HIDDEN_BELOW) & (bias > -torch.inf)

    def _past(self, mask: torch.Tensor) -> torch.Tensor:
        return mask.expand(*mask.shape[:-1], self.nk).tril()


def without_expanded_dims(mask: torch.Tensor) -> torch.Tensor:
    """``mask`` with size 1 where it is only expanded (stride 0), so that work on it stays small."""
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _future(scores: torch.Tensor, row: int, col: int) -> torch.Tensor:
    query = torch.arange(row, row + scores.shape[-2], device=scores.device)
    key = torch.arange(col, col + scores.shape[-1], device=scores.device)
    return key > query[:, None]


def _narrow(mask: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    return mask if mask.shape[dim] == 1 else mask.narrow(dim, start, length)


def _as_float32(bias: torch.Tensor) -> torch.Tensor:
    """FP32 in which a finite bias stays finite: -finfo(float64).max hides, it does not exclude."""
    if bias.dtype != torch.float64:
        return bias.float()
    limit = torch.finfo(torch.float32).max
    return torch.where(bias.isinf(), bias, bias.clamp(-limit, limit)).float()
