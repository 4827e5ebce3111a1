"""What quantisation does to one attention call: errors on a few rows, and what foretells them.

A call of N tokens is measured on a fixed number of query rows against all keys. The rows come in
whole blocks, as quantisation sees them: a query's error depends on those that share its block.
Only the scale that FP4 shares among all queries of a head is that of the rows alone. The reference
is the host's own output, which the run needs anyway.
"""

import math
import zlib
from typing import NamedTuple

import torch

from ...kernels import attention
from ...kernels.metrics import Errors, compare
from .call import AttentionCall

BLOCK = 128  # queries whose mean or scale is shared, in any scheme
BLOCKS = 2  # per head and batch item
SCORES = 1 << 24  # elements of the probabilities that an entropy is computed from


class Sample(NamedTuple):
    """A call cut down to some rows; out [B, Hq, rows, D] is the host's attention of them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    out: torch.Tensor


class Predictors(NamedTuple):
    """What makes a call hard to quantise, read from its inputs alone.

    outlier_ratio: RMS of K's largest channel over its median channel, token mean removed, of the
    worst head. mean_share: of K's energy, what lies in the token mean, which smoothing removes.
    entropy: of the softmax, 0 (one key) to 1 (all keys alike).
    """

    outlier_ratio: float
    mean_share: float
    entropy: float


def take_sample(call: AttentionCall, out: torch.Tensor) -> Sample:
    """The measured part of ``call``; ``out`` is what the host answered, in the host's layout."""
    heads = call.q.shape[1]
    out = out if call.split_output else out.unflatten(2, (heads, -1)).transpose(1, 2)
    q, k, v, mask = call.q, call.k, call.v, call.mask
    if len(q) > 2:
        # The first and the last: with guidance, one is conditional and the other is not.
        items = slice(None, None, len(q) - 1)
        q, k, v, out = q[items], k[items], v[items], out[items]
        mask = mask[items] if mask is not None and len(mask) > 1 else mask
    rows = _rows(call.q_len, q.device)
    if rows is not None:
        q, out = q[:, :, rows], out[:, :, rows]
        mask = mask[:, :, rows] if mask is not None and mask.shape[2] > 1 else mask
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    return Sample(q, k, v, mask, scale, out)


def _rows(q_len: int, device: torch.device) -> torch.Tensor | None:
    """Row numbers of evenly spread whole blocks; None for all rows."""
    whole = q_len // BLOCK
    if q_len <= BLOCKS * BLOCK:
        return None
    starts = [(2 * i + 1) * whole // (2 * BLOCKS) * BLOCK for i in range(BLOCKS)]
    return torch.cat([torch.arange(start, start + BLOCK, device=device) for start in starts])


def errors_of(sample: Sample, precision: str, backend: str) -> Errors:
    """How far ``backend``'s attention in ``precision`` is from the host's."""
    q, k, v, mask, scale, reference = sample
    out = attention(q, k, v, precision=precision, mask=mask, scale=scale, backend=backend)
    return compare(out, reference)


def predictors_of(sample: Sample) -> Predictors:
    """See :class:`Predictors`; none of them needs the call's output."""
    k = sample.k.float()
    mean = k.mean(2, keepdim=True)
    channels = (k - mean).square().mean(2).sqrt()  # [B, H, D]
    largest, median = channels.amax(-1), channels.median(-1).values
    ratio = torch.where(largest > 0, largest / median, 1.0).amax()
    share = mean.square().sum() * k.shape[2] / k.square().sum().clamp_min(torch.finfo().tiny)
    return Predictors(ratio.item(), share.item(), _entropy(sample))


def _entropy(sample: Sample) -> float:
    """Mean entropy of the softmax over the sampled rows, as a part of the largest possible."""
    batch, heads, rows, _ = sample.q.shape
    keys = sample.k.shape[2]
    if keys == 1:
        return 0.0
    rows = min(rows, max(1, SCORES // (batch * heads * keys)))
    k = sample.k.repeat_interleave(heads // sample.k.shape[1], 1)
    scores = (sample.q[:, :, :rows].float() @ k.float().mT) * sample.scale
    mask = sample.mask
    if mask is not None:
        mask = mask[:, :, :rows] if mask.shape[2] > 1 else mask
        scores = (
            torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1)
    return (entropy.nanmean() / math.log(keys)).item()  # a row that sees no key is NaN


def blur(out: torch.Tensor, level: float, layer: str) -> torch.Tensor:
    """``out`` [..., channels] with noise of relative L1 ``level`` in every row.

    The noise of a layer is the same in every call of one shape, as errors of quantisation are much
    alike from step to step.
    """
    generator = torch.Generator(out.device).manual_seed(zlib.crc32(layer.encode()))
    noise = torch.randn(out.shape, generator=generator, device=out.device)
    size = out.float().abs().mean(-1, keepdim=True) * (level * math.sqrt(math.pi / 2))
    return (out + noise * size).to(out.dtype)
