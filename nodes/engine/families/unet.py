"""The UNet of SD 1.x, SD 2.x, SDXL and Stable Video Diffusion."""

from collections.abc import Iterator

from .blocks import SELF_CROSS, Block


def unet_blocks(model: object) -> tuple[Block, ...]:
    blocks = []
    for side, modules in (
        ("input", model.input_blocks),
        ("middle", [model.middle_block] if model.middle_block is not None else []),
        ("output", model.output_blocks),
    ):
        for number, sequence in enumerate(modules):
            blocks += _transformers(side, number, sequence)
    return tuple(blocks)


def _transformers(side: str, number: int, sequence: object) -> Iterator[Block]:
    for module in sequence:
        temporal = getattr(module, "time_stack", None)
        for i, block in enumerate(getattr(module, "transformer_blocks", ())):
            roles = _roles(block)
            if temporal is not None:
                # The host gives both the same keys; they run in turn.
                roles += tuple(f"time_{role}" for role in _roles(temporal[i]))
            yield Block(
                stack=side,
                index=(number, i),
                roles=roles,
                named_roles=True,
                key=(side, number, i),
            )


def _roles(block: object) -> tuple[str, ...]:
    return SELF_CROSS if block.attn2 is not None else ("self",)
