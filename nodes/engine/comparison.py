"""How far a picture, a video or a latent is from its reference, in figures.

PSNR and SSIM are kornia's. What a video adds is told by how it changes from frame to frame.
"""

import math
from typing import Any, NamedTuple

import torch

SSIM_WINDOW = 11  # pixels; the window of the paper that defined SSIM
_SMALLEST_SIDE = SSIM_WINDOW // 2 + 1  # kornia mirrors the edges by half a window


class ComparisonError(ValueError):
    """The two can't be compared. The message says why, and what to connect instead."""


class Sequences(NamedTuple):
    """What is compared, on a scale of 0 to 1.

    reference, result: [sequences, frames, channels, height, width], float32. kind: "picture" or
    "latent", for texts.
    """

    reference: torch.Tensor
    result: torch.Tensor
    kind: str


class Motion(NamedTuple):
    """How the result changes from frame to frame, beside the reference.

    energy: mean square of its changes over that of the reference's; over 1 is flicker. error:
    relative L1 of its changes against the reference's. Both are infinite where the reference stands
    still and the result does not.
    """

    energy: float
    error: float


class Comparison(NamedTuple):
    """psnr: dB of each frame, infinite where nothing differs. ssim: of each frame, empty where the
    frames are smaller than its window. motion: None for single frames.
    """

    psnr: list[float]
    ssim: list[float]
    motion: Motion | None

    @property
    def overall_psnr(self) -> float:
        """Of the mean square error over all frames."""
        errors = [10 ** (-value / 10) for value in self.psnr]
        return _decibels(sum(errors) / len(errors))

    @property
    def overall_ssim(self) -> float:
        return sum(self.ssim) / len(self.ssim)

    @property
    def worst(self) -> int:
        """Number of the frame with the lowest PSNR."""
        return self.psnr.index(min(self.psnr))


def pair_up(reference: Any, result: Any) -> Sequences:
    """Two IMAGEs or two LATENTs as the host passes them, ready to compare.

    Images count as they would be saved: clamped to 0..1. Latents are put on the scale of the
    reference's smallest and largest number. Raises ComparisonError for anything that can't be
    compared.
    """
    kinds = [_kind_of("reference", reference), _kind_of("result", result)]
    if kinds[0] != kinds[1]:
        raise ComparisonError(
            f"reference is {kinds[0]} and result is {kinds[1]}: connect two of one kind"
        )
    if kinds[0] == "IMAGE":
        pair = [images.movedim(-1, 1)[None] for images in (reference, result)]
    else:
        pair = [_frames_of_latent(latent["samples"]) for latent in (reference, result)]
    _check_shapes(*pair)
    pair = [frames.detach().float().cpu() for frames in pair]
    _check_numbers("reference", pair[0])
    _check_numbers("result", pair[1])
    if kinds[0] == "IMAGE":
        return Sequences(*(frames.clamp(0, 1) for frames in pair), "picture")
    low, high = pair[0].aminmax()
    if low == high:
        raise ComparisonError(
            f"all numbers of the reference latent are {low:g}: connect what a sampler made, not an "
            "empty latent"
        )
    return Sequences(*((frames - low) / (high - low) for frames in pair), "latent")


def compare_sequences(pair: Sequences) -> Comparison:
    """Frame by frame: what SSIM needs for one is seven times its size."""
    from kornia.metrics import psnr, ssim  # a tenth of a second, and not needed to load the pack

    psnrs, ssims = [], []
    frames = zip(pair.reference.flatten(0, 1), pair.result.flatten(0, 1), strict=True)
    for reference, result in frames:
        psnrs.append(psnr(result, reference, 1.0).item())
        if min(reference.shape[-2:]) >= _SMALLEST_SIDE:
            # eps: kornia's default takes 1e-5 off the score of two equal black pictures
            ssims.append(ssim(result[None], reference[None], SSIM_WINDOW, eps=0.0).mean().item())
    motion = compare_motion(pair.reference, pair.result) if pair.reference.shape[1] > 1 else None
    return Comparison(psnrs, ssims, motion)


def compare_motion(reference: torch.Tensor, result: torch.Tensor) -> Motion:
    """Of sequences [sequences, frames, ...] of two frames or more."""
    changed, wanted, missed, size = 0.0, 0.0, 0.0, 0.0
    for i in range(1, reference.shape[1]):
        ours = result[:, i].double() - result[:, i - 1]
        theirs = reference[:, i].double() - reference[:, i - 1]
        changed += ours.square().sum().item()
        wanted += theirs.square().sum().item()
        missed += (ours - theirs).abs().sum().item()
        size += theirs.abs().sum().item()
    energy = changed / wanted if wanted else (math.inf if changed else 1.0)
    error = missed / size if size else (math.inf if missed else 0.0)
    return Motion(energy, error)


def _kind_of(name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.ndim == 4 and value.numel():
            return "IMAGE"
        raise ComparisonError(
            f"{name} has the shape {list(value.shape)}, which is no batch of images: connect an "
            "IMAGE or a LATENT"
        )
    samples = value.get("samples") if isinstance(value, dict) else None
    if not isinstance(samples, torch.Tensor) or not samples.numel():
        raise ComparisonError(
            f"{name} is neither an IMAGE nor a LATENT of one tensor: connect what VAE Decode or a "
            "sampler gives"
        )
    return "LATENT"


def _frames_of_latent(samples: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] as one sequence of B frames, [B, C, T, H, W] as B sequences of T."""
    if samples.ndim == 4:
        return samples[None]
    if samples.ndim == 5:
        return samples.transpose(1, 2)
    raise ComparisonError(
        f"latents of the shape {list(samples.shape)} are no pictures: decode them, or compare "
        "latents of images or videos"
    )


def _check_shapes(reference: torch.Tensor, result: torch.Tensor) -> None:
    if reference.shape != result.shape:
        raise ComparisonError(
            f"reference is {_size_of(reference)}, result is {_size_of(result)}: make both with the "
            "same size, length and batch, or cut one to the other first"
        )


def _size_of(frames: torch.Tensor) -> str:
    sequences, length, channels, height, width = frames.shape
    several = f"{sequences} x " if sequences > 1 else ""
    return f"{several}{length} of {width} x {height} with {channels} channels"


def _check_numbers(name: str, frames: torch.Tensor) -> None:
    finite = torch.stack([frame.isfinite().all() for frame in frames.flatten(0, 1)])
    if not finite.all():
        bad = (~finite).nonzero().flatten()
        raise ComparisonError(
            f"{name} holds NaN or infinity in {len(bad)} of {len(finite)} frames, the first is "
            f"number {bad[0] + 1}: it would be saved as black. Something overflowed while it was "
            "made; SageAttention3 Report shows which layers were quantised, to keep them in fp16"
        )


def _decibels(mean_square_error: float) -> float:
    return -10 * math.log10(mean_square_error) if mean_square_error else math.inf


def describe_comparison(comparison: Comparison, kind: str) -> str:
    """The figures in words, one line each."""
    count = len(comparison.psnr)
    if all(math.isinf(value) for value in comparison.psnr):
        return f"Identical: no value of {_count(count, kind)} differs."
    figures = f"PSNR {comparison.overall_psnr:.1f} dB"
    if comparison.ssim:
        figures += f", SSIM {comparison.overall_ssim:.4f}"
    lines = [f"{figures} over {_count(count, kind)}."]
    if kind == "latent":
        lines[0] += " Relative to the range of the reference's numbers."
    if count > 1:
        worst = comparison.worst
        line = f"Worst: number {worst + 1}, PSNR {comparison.psnr[worst]:.1f} dB"
        if comparison.ssim:
            line += f", SSIM {comparison.ssim[worst]:.4f}"
        lines.append(f"{line}.")
    if comparison.motion:
        lines.append(_describe_motion(comparison.motion))
    return "\n".join(lines)


def _describe_motion(motion: Motion) -> str:
    if math.isinf(motion.energy):
        return "As a video: the reference stands still, the result does not."
    return (
        f"As a video: from frame to frame it changes with {motion.energy:.3f} times the "
        f"reference's energy (more than 1 is flicker); relative error of these changes "
        f"{motion.error:.3f}."
    )


def _count(number: int, kind: str) -> str:
    return f"{number} {kind}{'s' if number > 1 else ''}"
