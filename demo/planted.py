"""A tiny model with one layer that is hard to quantise, for tests and pictures of calibration."""

from typing import Any

from . import tiny

# RMS of the outlier channels over the others. FP4 shares such a difference out between Q and K, but
# not one of this size (SMALLEST_SHARE in kernels/reference/smoothing.py): at 1e4 nothing is lost.
OUTLIERS = 1e6


def planted_flux(layer: str) -> Any:
    """A tiny Flux whose ``layer`` (``double.1``, ``single.0``) has outliers in K that Q makes up
    for: at full precision it computes what it did.
    """
    model = tiny.model("flux")
    stack, _, number = layer.partition(".")
    block = model.model.diffusion_model.get_submodule(f"{stack}_blocks.{number}")
    norms = [block.norm] if stack == "single" else [block.img_attn.norm, block.txt_attn.norm]
    for norm in norms:
        # Pairs of channels, which the position embedding turns into one another, in each sixteen
        # that share a scale in FP4.
        for start in range(0, len(norm.key_norm.scale), 16):
            norm.key_norm.scale.data[start : start + 2] *= OUTLIERS
            norm.query_norm.scale.data[start : start + 2] /= OUTLIERS
    return model
