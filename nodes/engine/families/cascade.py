"""Stable Cascade, stages B and C: attention blocks inside a ladder of levels."""

from collections.abc import Iterator

from .blocks import JOINT, Block


def cascade_blocks(model: object) -> tuple[Block, ...]:
    return (
        *_ladder("down", model.down_blocks, model.down_repeat_mappers),
        *_ladder("up", model.up_blocks, model.up_repeat_mappers),
    )


def _ladder(stack: str, levels: object, repeat_mappers: object) -> Iterator[Block]:
    # zip as the host does: without repeat mappers it runs no level at all.
    for number, (level, mappers) in enumerate(zip(levels, repeat_mappers, strict=False)):
        found = [
            Block(stack, (number, i), JOINT, named_roles=False)
            for i, module in enumerate(level)
            if hasattr(module, "kv_mapper")
        ]
        # The same modules run once more per mapper: the same layers, called again.
        for _ in range(len(mappers) + 1):
            yield from found
