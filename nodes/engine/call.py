"""One attention call of the host, in any of its argument forms, as plain [B, H, N, D] tensors.

ComfyUI calls ``optimized_attention(q, k, v, heads, mask=None, ...)`` in many ways: packed
(B, N, H*D) or split (B, H, N, D) inputs, a 4-D v beside a 3-D q (SD3), the mask by position or by
name, the output split or packed, and extra arguments that newer versions added. This module is the
only place that knows these forms.
"""

from typing import Any, NamedTuple

import torch


class AttentionCall(NamedTuple):
    """q: [B, Hq, Nq, D]; k, v: [B, Hk, Nk, D], views of the caller's tensors.

    mask: bool (True = attend) or additive, 4-D, broadcastable to [B, Hq, Nq, Nk]; None if absent.
    scale: softmax scale; None means D ** -0.5.
    split_output: the caller wants [B, Hq, Nq, D] instead of [B, Nq, Hq*D].
    ignored: names of arguments that mean nothing to a kernel of this version.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scale: float | None
    split_output: bool
    ignored: tuple[str, ...]

    @property
    def q_len(self) -> int:
        return self.q.shape[2]

    @property
    def kv_len(self) -> int:
        return self.k.shape[2]

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """``out`` [B, Hq, Nq, D] in the layout that the caller expects."""
        return out if self.split_output else out.transpose(1, 2).flatten(2)


class Refusal(NamedTuple):
    """A call that only the host can serve, and why, as a clause for the report."""

    reason: str
    q_len: int
    kv_len: int


def read_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: Any = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    low_precision_attention: bool = True,
    transformer_options: dict | None = None,
    _inside_attn_wrapper: bool = True,
    **unknown: Any,
) -> AttentionCall | Refusal:
    """The host's arguments as an ``AttentionCall``, or why only the host can serve them.

    Parameters are the host's own, by its names and order, so that a call binds as it does there.
    """
    # Tokens are the last dimension but one, except in (B, N, H, D).
    q_len, kv_len = q.shape[-2], k.shape[1 if k.ndim == 4 and not skip_reshape else -2]
    objection = _objection(low_precision_attention, attn_precision, mask, unknown)
    if objection:
        return Refusal(objection, q_len, kv_len)

    if not skip_reshape:
        if q.ndim != 3 or q.shape[2] % heads:
            return Refusal(f"q {list(q.shape)} does not split into {heads} heads", q_len, kv_len)
        head_dim = q.shape[2] // heads
        q, k, v = _split_heads(q, head_dim), _split_heads(k, head_dim), _split_heads(v, head_dim)
        if k is None or v is None:
            return Refusal(f"k or v does not split into heads of {head_dim}", q_len, kv_len)
    elif q.ndim != 4 or k.ndim != 4 or q.shape[1] != heads:
        return Refusal(f"q {list(q.shape)} is not [B, {heads}, N, D] as announced", q_len, kv_len)
    if k.shape[1] != heads and not enable_gqa:
        return Refusal(
            f"{k.shape[1]} key heads for {heads} query heads, without the flag for it",
            q_len,
            kv_len,
        )

    if mask is not None:
        mask = _mask_as_4d(mask, q_len)
        if mask is None:
            return Refusal("the mask's shape has no agreed meaning", q_len, kv_len)
    ignored = tuple(sorted(name for name, value in unknown.items() if value))
    return AttentionCall(q, k, v, mask, scale, skip_output_reshape, ignored)


def _objection(
    low_precision_attention: bool,
    attn_precision: torch.dtype | None,
    mask: Any,
    unknown: dict[str, Any],
) -> str:
    """What in the arguments beside q, k, v rules kernels out; empty if nothing does."""
    if not low_precision_attention:
        return "the model asks for full precision here (low_precision_attention=False)"
    if attn_precision == torch.float32:
        return "the model asks for float32 attention here (attn_precision)"
    if mask is not None and not torch.is_tensor(mask):
        return f"the mask is a {type(mask).__name__} object, not a tensor"
    for name, value in unknown.items():
        # A tensor changes the result for sure; a flag of a newer host most likely tunes its own.
        if torch.is_tensor(value):
            return f"the model passes a tensor that this version does not know ({name})"
    return ""


def _split_heads(packed: torch.Tensor, head_dim: int) -> torch.Tensor | None:
    """(B, N, H*D) or (B, N, H, D) -> [B, H, N, D], a view whatever the strides; None if neither."""
    if packed.ndim == 3 and packed.shape[2] % head_dim == 0:
        packed = packed.unflatten(2, (packed.shape[2] // head_dim, head_dim))
    if packed.ndim != 4 or packed.shape[3] != head_dim:
        return None
    return packed.transpose(1, 2)


def _mask_as_4d(mask: torch.Tensor, q_len: int) -> torch.Tensor | None:
    """(Nq, Nk), (B, Nq, Nk) or 4-D, each with broadcast dimensions of 1 -> 4-D; None if neither.

    A 2-D mask of B rows would be a key padding mask in some models and an error in the host's
    SDPA: that is left to the host.
    """
    if mask.ndim == 2 and mask.shape[0] in (1, q_len):
        return mask[None, None]
    if mask.ndim == 3:
        return mask[:, None]
    return mask if mask.ndim == 4 else None
