"""Wan 2.x: self-attention, then one or two cross-attentions per block; VACE adds a side network."""

from .blocks import SELF_CROSS, Block, Stack


def _wan_roles(block: object) -> tuple[str, ...]:
    # Image-to-video attends to the reference image's tokens and to the prompt in separate calls.
    roles = ("self", "image", "text") if hasattr(block.cross_attn, "k_img") else SELF_CROSS
    return (*roles, "audio") if hasattr(block, "audio_cross_attn_wrapper") else roles


wan_block = Stack(
    "block", "blocks", _wan_roles, hook="double_block", optional=(("audio", "audio_embed"),)
)
_vace_block = Stack("vace", "vace_blocks", _wan_roles, main=False, repeats=True)


def vace_blocks(model: object) -> tuple[Block, ...]:
    """VACE block n runs right after the main block it feeds, once per control video."""
    side = list(_vace_block.blocks(model))
    blocks = []
    for i, block in enumerate(wan_block.blocks(model)):
        blocks.append(block)
        if i in model.vace_layers_mapping:
            blocks.append(side[model.vace_layers_mapping[i]])
    return tuple(blocks)
