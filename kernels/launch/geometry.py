"""How launchers cut calls up: sizes that depend on shapes alone."""

from functools import lru_cache

import torch

HEAD_DIMS = (64, 96, 128, 256)  # others are padded to the next
MOST_CHUNKS = 32  # every block of a packing kernel reads what was found in all of them
SMALLEST_CHUNK = 256  # tokens
TURN = 128  # tokens that the threads of a block read at a time
MOST_BLOCKS_EACH = 8
ALIGNMENT = 256  # bytes, of the parts of a buffer


def padded_head_dim(channels: int, head_dims: tuple[int, ...] = HEAD_DIMS) -> int:
    return next(d for d in head_dims if d >= channels)


def parts(whole: int, part: int) -> int:
    return -(-whole // part)


def chunk(reductions: int, tokens: int, device: int) -> tuple[int, int]:
    """Into how many chunks of how many tokens each of ``reductions`` tensors is cut."""
    wanted = parts(4 * _multiprocessors(device), reductions)
    chunks = max(1, min(wanted, MOST_CHUNKS, tokens // SMALLEST_CHUNK))
    # Whole turns of a block's threads, whose loads need no test of each token.
    size = parts(tokens, chunks * TURN) * TURN
    return parts(tokens, size), size


def blocks_each(blocks: int, device: int) -> int:
    """How many of ``blocks`` in all one block of threads packs: enough of those for every SM."""
    return max(1, min(MOST_BLOCKS_EACH, blocks // (16 * _multiprocessors(device))))


def one_each(blocks: int, device: int) -> int:
    """Blocks to launch of kernels whose blocks go on to the next one's work: one for every SM."""
    return min(blocks, _multiprocessors(device))


def place(sizes: dict[str, int]) -> dict[str, int]:
    """Offsets of parts of these ``sizes`` in one buffer, and its size as ``bytes``.

    One buffer, as each allocation costs microseconds.
    """
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += parts(size, ALIGNMENT) * ALIGNMENT
    return {**offsets, "bytes": end}


@lru_cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
