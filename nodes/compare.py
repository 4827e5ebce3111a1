"""The node that measures a picture, a video or a latent against its reference."""

from typing import Any

from .engine.comparison import compare_sequences, describe_comparison, pair_up
from .engine.comparison_chart import comparison_chart
from .shown import shown

KINDS = ("IMAGE", "LATENT")
EITHER = ",".join(KINDS)  # how the host writes an input that takes both


class SageAttention3Compare:
    TITLE = "SageAttention3 Compare"
    CATEGORY = "SageAttention3"
    DESCRIPTION = (
        "Says how far pictures, videos or latents are from those made without the patch: PSNR, "
        "SSIM and flicker, and shows where they differ. Same seed and settings for both."
    )
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("comparison", "report")
    OUTPUT_TOOLTIPS = (
        "The frame that differs most: reference, result, difference; PSNR over frames.",
        "The figures, as text.",
    )
    OUTPUT_NODE = True
    FUNCTION = "compare"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {
            "required": {
                "reference": (
                    EITHER,
                    {"tooltip": "What is right: images or latents made without quantisation."},
                ),
                "result": (
                    EITHER,
                    {"tooltip": "What to judge: the same kind, size and number as reference."},
                ),
            }
        }

    @classmethod
    def VALIDATE_INPUTS(cls, input_types) -> bool | str:  # noqa: N802
        """Both of one kind, before anything runs. With ``input_types`` the host leaves it to us."""
        kinds = {name: set(given.split(",")) for name, given in input_types.items()}
        for name, given in kinds.items():
            if not given & {*KINDS, "*"}:
                return f"{name} is {input_types[name]}: connect an IMAGE or a LATENT"
        both = [given for given in kinds.values() if "*" not in given]
        if len(both) == 2 and not both[0] & both[1]:
            told = " and ".join(f"{name} is {given}" for name, given in input_types.items())
            return f"{told}: connect two of one kind"
        return True

    def compare(self, reference: Any, result: Any) -> dict:
        pair = pair_up(reference, result)
        comparison = compare_sequences(pair)
        text = describe_comparison(comparison, pair.kind)
        image = comparison_chart(pair, comparison)
        return {"ui": shown(text, image), "result": (image, text)}
