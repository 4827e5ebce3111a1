"""Q, K and V as a scheme's matrix products see them: smoothed, quantised, dequantised to FP32."""

import math
from typing import NamedTuple

import torch

from .formats import (
    MXFP4_BLOCK,
    pad_to_multiple,
    quantise_8bit,
    quantise_mxfp4,
    quantise_nvfp4,
)
from .scheme import Scheme
from .smoothing import balance_factors, block_mean, hadamard, per_token, token_mean
from .visibility import Visibility


class Operands(NamedTuple):
    """One slice of a call. Dq >= D and Nk' >= Nk where a block format padded with zeros.

    q: [B, Hk, G, Nq, Dq] times the softmax scale. k: [B, Hk, Nk, Dq]. v: [B, Hk, Nk', D].
    q_mean: [B, Hk, G, blocks, D] times the softmax scale and smooth_k [B, Hk, Nk, D], the FP32
        factors of the scores that smoothing took from Q; None unless the scheme smooths Q.
    k_mean, v_mean [B, Hk, 1, D] and v_scale [B, Hk, 1, D or 1]; None where not applied.
        O = P v * v_scale + v_mean.
    block_q: queries per row of q_mean.
    nonfinite: what NaN and infinite inputs need; None if there are none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_mean: torch.Tensor | None
    smooth_k: torch.Tensor
    k_mean: torch.Tensor | None
    v_mean: torch.Tensor | None
    v_scale: torch.Tensor | None
    nonfinite: "Nonfinite | None"
    block_q: int

    def smoothed_away(self, q: torch.Tensor) -> torch.Tensor | float:
        """What smoothing K took from every score of a row of ``q`` [B, Hk, G, Nq, D], unscaled."""
        if self.k_mean is None:
            return 0.0
        return (q.float() * self.k_mean[:, :, None]).sum(-1)


class Nonfinite(NamedTuple):
    """Where the inputs are NaN or infinite, and what the products are there.

    q [B, Hk, G, Nq, D] (times the softmax scale) and k [B, Hk, Nk, D] as given; q_rows and
    k_rows: bool, the tokens with such a value; v: the such values of V, zero elsewhere.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_rows: torch.Tensor
    k_rows: torch.Tensor


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visibility: Visibility,
    scheme: Scheme,
    scale: float,
) -> Operands:
    """Operands of q [B, Hk, G, Nq, D] and k, v [B, Hk, Nk, D], any float dtype.

    Keys that no query sees enter as zeros and take part in no statistic. NaN and infinite values
    likewise, so that a shared scale cannot spread them; ``nonfinite`` holds them.
    """
    # Contiguous, so that sums run in the same order whatever the caller's strides.
    q, k, v = (x.float().contiguous() for x in (q, k, v))
    k, v = k[:, :, None], v[:, :, None]
    live = visibility.live_keys(k.device)
    if live is not None:
        k, v = k.masked_fill(~live, 0.0), v.masked_fill(~live, 0.0)
    q, k, v, nonfinite = _set_nonfinite_aside(q, k, v, scale)

    k_mean = v_mean = q_mean = None
    if scheme.smooth_k:
        k_mean = token_mean(k, live)
        k = _centre(k, k_mean, live)
    if scheme.smooth_v:
        v_mean = token_mean(v, live)
        v = _centre(v, v_mean, live)
    if scheme.balance:
        factor = balance_factors(q, k, live)
        q, k = q * factor, k / factor
    if scheme.rotate:
        rotation = hadamard(q.shape[-1], q.device).double()
        # In FP64, since in FP32 a GPU may take TF32, whose rounding moves codes.
        q, k = (q.double() @ rotation).float(), (k.double() @ rotation).float()
    smooth_k = k
    if scheme.smooth_q:
        q_mean = block_mean(q, scheme.block_q)
        q = q - per_token(q_mean, scheme.block_q, q.shape[-2])
        q_mean = q_mean * scale

    q = _quantise_channels(q, scheme, is_key=False) * scale
    k = _quantise_channels(k, scheme, is_key=True)
    v, v_scale = _quantise_tokens(v, scheme)
    squeeze = [
        None if x is None else x.squeeze(2) for x in (k, v, smooth_k, k_mean, v_mean, v_scale)
    ]
    k, v, smooth_k, k_mean, v_mean, v_scale = squeeze
    return Operands(q, k, v, q_mean, smooth_k, k_mean, v_mean, v_scale, nonfinite, scheme.block_q)


def _centre(x: torch.Tensor, mean: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    x = x - mean
    return x if live is None else x.masked_fill_(~live, 0.0)


def _quantise_channels(x: torch.Tensor, scheme: Scheme, *, is_key: bool) -> torch.Tensor:
    """Q or K [..., N, D] in the format of QK^T, dequantised."""
    if scheme.qk == "exact":
        return x
    if scheme.qk in ("int8", "e4m3"):
        values, scale = quantise_8bit(x, _shared_amax(x, scheme, is_key), scheme.qk)
        return values.mul_(scale)
    x = pad_to_multiple(x, MXFP4_BLOCK)
    if scheme.qk == "mxfp4":
        return quantise_mxfp4(x).dequantise()
    return quantise_nvfp4(x, search=scheme.scale_search).dequantise()


def _quantise_tokens(v: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """V [..., N, D] in the format of PV, and the FP32 scale left for the end (None: 1).

    The scale waits so that sums over keys stay far from FP32's maximum.
    """
    if scheme.pv == "exact":
        return v, None
    if scheme.pv in ("nvfp4", "mxfp4"):
        tokens_last = pad_to_multiple(v.mT.contiguous(), MXFP4_BLOCK)
        if scheme.pv == "mxfp4":
            return quantise_mxfp4(tokens_last).dequantise().mT, None
        blocks = quantise_nvfp4(tokens_last, search=scheme.scale_search)
        return blocks.without_tensor_scale().mT, blocks.tensor_scale
    kind = "e4m3" if scheme.pv == "e4m3" else "int8"
    if scheme.v_scale == "channel":
        return quantise_8bit(v, v.abs().amax(-2, keepdim=True), kind)
    amax = _group_amax(v.abs().amax(-1), scheme.block_k)
    values, scale = quantise_8bit(v, amax[..., None], kind)
    return values.mul_(scale), None


def _shared_amax(x: torch.Tensor, scheme: Scheme, is_key: bool) -> torch.Tensor:
    """For each token of ``x`` [..., N, D], the largest |x| of the tokens that share its scale."""
    amax = x.abs().amax(-1)
    if scheme.qk_scale == "block":
        amax = _group_amax(amax, scheme.block_k if is_key else scheme.block_q)
    elif is_key:
        # Keys 8i + 2t and 8i + 2t + 1 of a tile are the columns that thread t of a quad holds.
        threads = pad_to_multiple(amax, scheme.block_k).unflatten(
            -1, (-1, scheme.block_k // 8, 4, 2)
        )
        shared = threads.amax((-3, -1), keepdim=True).expand_as(threads)
        amax = shared.flatten(-4)[..., : amax.shape[-1]]
    return amax[..., None]


def _group_amax(amax: torch.Tensor, group: int) -> torch.Tensor:
    """``amax`` [..., N] with each entry replaced by the largest of its ``group`` neighbours."""
    groups = pad_to_multiple(amax, group).unflatten(-1, (-1, group))
    return groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)[..., : amax.shape[-1]]


def _set_nonfinite_aside(q, k, v, scale: float):
    # One reduction per tensor in the everyday case; a maximum keeps NaN and cannot overflow.
    if all(math.isfinite(x.abs().amax().item()) for x in (q, k, v)):
        return q, k, v, None
    q_finite, k_finite, v_finite = (torch.isfinite(x) for x in (q, k, v))
    aside = Nonfinite(
        q * scale,
        k.squeeze(2),
        v.masked_fill(v_finite, 0.0).squeeze(2),
        ~q_finite.all(-1),
        ~k_finite.all(-1).squeeze(2),
    )
    finite = (x.masked_fill(~f, 0.0) for x, f in ((q, q_finite), (k, k_finite), (v, v_finite)))
    return *finite, aside
