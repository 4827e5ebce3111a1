"""What INT8 attention does around its kernel, whichever that is."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .int8_layout import BLOCK_KEYS, lay_out
from .int8_quantise import Packed, readable
from .operands import aligned, first_channels, in_reach, true_lse


class Int8Attention(NamedTuple):
    """INT8 attention of any tensors, by what computes it of those that kernels read.

    attend_readable: ``(q, k, v, layout, lse, *, mask, scale, causal) -> (out, Packed)`` of tensors
    and their layout as :func:`readable` gives them; ``lse`` as in :meth:`attend_smoothed`, or None.
    tile_keys: of Layout.
    """

    attend_readable: Callable[..., tuple[torch.Tensor, Packed]]
    tile_keys: int = BLOCK_KEYS

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        scale: float,
        causal: bool,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``softmax(scale Q K^T + mask) V`` in INT8: [B, Hq, Nq, D], token-major in memory.

        q: [B, Hq, Nq, D]; k, v: [B, Hk, Nk, D], all fp16, bf16 or fp32. mask: None, bool (True =
        attend) or additive, [B|1, Hq|1, Nq|1, Nk|1]. Which D and masks: the backend's constraints.
        return_lse: also the logarithm of the sum of each row's exponentiated scores, FP32
        [B, Hq, Nq].
        """
        lse = None
        if return_lse:
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        out, packed = self.attend_smoothed(q, k, v, lse, mask=mask, scale=scale, causal=causal)
        return (out, true_lse(lse, q, packed.key_mean(k), scale)) if return_lse else out

    def attend_smoothed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        mask: torch.Tensor | None,
        scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, Packed]:
        """As :meth:`attend`, with the quantised operands beside the output.

        Writes, if given, ``lse`` [B, Hq, Nq], contiguous: that of the scores of smoothed K.
        """
        channels = q.shape[3]
        k, v, mask = in_reach(k, v, mask, causal, q)
        q, k, v, layout = readable(q, k, v, self.tile_keys)
        out, packed = self.attend_readable(
            q, k, v, layout, lse, mask=mask, scale=scale, causal=causal
        )
        return first_channels(out, channels), packed

    def prepare(self, q, k, v, *, causal: bool) -> Callable[..., torch.Tensor] | None:
        """``Backend.prepare``."""
        if (causal and k.shape[2] > q.shape[2]) or not q.dtype == k.dtype == v.dtype:
            return None
        layout = lay_out(q, k, v, self.tile_keys)

        def compute(q, k, v, *, mask: None, scale: float) -> torch.Tensor:
            given = layout
            if not aligned(q, k, v):
                q, k, v, given = readable(q, k, v, self.tile_keys)
            options = {"mask": None, "scale": scale, "causal": causal}
            return self.attend_readable(q, k, v, given, None, **options)[0]

        return compute if layout.in_vectors else None
