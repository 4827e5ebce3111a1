"""Q, K and V as a scheme's matrix products see them: smoothed, quantised, dequantised to FP32."""

from typing import NamedTuple

import torch

from .formats import (
    E4M3_MAX,
    INT8_MAX,
    MXFP4_BLOCK,
    nonzero_scale,
    pad_to_multiple,
    quantise_mxfp4,
    quantise_nvfp4,
    round_e4m3,
    round_int8,
)
from .scheme import Scheme
from .smoothing import block_mean, hadamard, per_token, token_mean
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
    if scheme.rotate:
        rotation = hadamard(q.shape[-1], q.device)
        q, k = q @ rotation, k @ rotation
    smooth_k = k
    if scheme.smooth_q:
        q_mean = block_mean(q, scheme.block_q)
        q = q - per_token(q_mean, scheme.block_q, q.shape[-2])
        q_mean = q_mean * scale

    q = _quantise_channels(q, scheme, scheme.block_q).mul(scale)
    k = _quantise_channels(k, scheme, scheme.block_k)
    v, v_scale = _quantise_tokens(v, scheme)
    squeeze = [
        None if x is None else x.squeeze(2) for x in (k, v, smooth_k, k_mean, v_mean, v_scale)
    ]
    k, v, smooth_k, k_mean, v_mean, v_scale = squeeze
    return Operands(q, k, v, q_mean, smooth_k, k_mean, v_mean, v_scale, nonfinite, scheme.block_q)


def _centre(x: torch.Tensor, mean: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    x = x - mean
    return x if live is None else x.masked_fill_(~live, 0.0)


def _quantise_channels(x: torch.Tensor, scheme: Scheme, block: int) -> torch.Tensor:
    """Q or K [..., N, D] in the format of QK^T, dequantised."""
    if scheme.qk == "exact":
        return x
    if scheme.qk == "int8":
        scale = per_token(int8_scale(x, block), block, x.shape[-2])
        return round_int8(x, scale).mul_(scale)
    x = pad_to_multiple(x, MXFP4_BLOCK)
    if scheme.qk == "mxfp4":
        return quantise_mxfp4(x).dequantise()
    return quantise_nvfp4(x, search=scheme.scale_search).dequantise()


def int8_scale(x: torch.Tensor, block: int) -> torch.Tensor:
    """INT8 scales of ``x`` [..., N, D] per block of tokens: [..., ceil(N / block), 1]."""
    amax = x.abs().amax(-1)
    amax = pad_to_multiple(amax, block).unflatten(-1, (-1, block)).amax(-1, keepdim=True)
    return nonzero_scale(amax / INT8_MAX)


def _quantise_tokens(v: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """V [..., N, D] in the format of P V, and the FP32 scale left for the end (None: 1).

    The scale waits so that sums over keys stay far from FP32's maximum.
    """
    if scheme.pv == "exact":
        return v, None
    if scheme.pv == "mxfp4":
        return quantise_mxfp4(pad_to_multiple(v.mT, MXFP4_BLOCK)).dequantise().mT, None
    if scheme.pv == "nvfp4":
        blocks = quantise_nvfp4(pad_to_multiple(v.mT, MXFP4_BLOCK), search=scheme.scale_search)
        return blocks.without_tensor_scale().mT, blocks.tensor_scale
    if scheme.v_scale == "block":
        scale = per_token(int8_scale(v, scheme.block_k), scheme.block_k, v.shape[-2])
        return round_int8(v, scale).mul_(scale), None
    amax = v.abs().amax(-2, keepdim=True)
    if scheme.pv == "e4m3":
        scale = nonzero_scale(amax / E4M3_MAX)
        return round_e4m3(v / scale), scale
    scale = nonzero_scale(amax / INT8_MAX)
    return round_int8(v, scale), scale


def _set_nonfinite_aside(q, k, v, scale: float):
    # One reduction per tensor in the everyday case; the sum of |x| would overflow in FP32.
    if all(torch.isfinite(x.abs().amax()) for x in (q, k, v)):
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
