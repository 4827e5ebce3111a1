"""What attention layers a model has, and in which order a forward pass calls them."""

from dataclasses import dataclass
from functools import cached_property

from .families import FAMILIES, Block, Family

_HOST_PACKAGE = "comfy.ldm."


@dataclass(frozen=True)
class Layout:
    """The attention layers of one model. Made by :func:`describe_model`."""

    family: str
    order: tuple[Block, ...] = ()  # execution order; a block that runs twice stands twice
    known: bool = True  # False: no adapter; layers are call.0, call.1 ... and their number unknown

    @cached_property
    def all_blocks(self) -> tuple[Block, ...]:
        """Each block once, those beside the main stacks too, in execution order."""
        return tuple(dict.fromkeys(self.order))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the main stacks, in execution order: what `first` and `last` count."""
        return tuple(block for block in self.all_blocks if block.main)

    @cached_property
    def stacks(self) -> dict[str, tuple[Block, ...]]:
        """Stack name -> its blocks, in execution order."""
        stacks: dict[str, tuple[Block, ...]] = {}
        for block in self.all_blocks:
            stacks[block.stack] = (*stacks.get(block.stack, ()), block)
        return stacks

    @cached_property
    def layer_ids(self) -> tuple[str, ...]:
        """Every layer id, in execution order. Empty if the family is unknown."""
        return tuple(layer.id for block in self.all_blocks for layer in block.layers)

    def has(self, layer_id: str) -> bool:
        return layer_id in self.layer_ids if self.known else layer_id.startswith("call.")

    def summary(self) -> str:
        """The stacks in words, for messages: ``double.0-18, single.0-37``."""
        if not self.known:
            return "call.0, call.1, ... in order"
        parts = []
        for name, blocks in self.stacks.items():
            numbers = list(dict.fromkeys(block.index[0] for block in blocks))
            roles = dict.fromkeys(role for block in blocks for role in block.roles)
            text = f"{name}.{_ranges(numbers)}"
            parts.append(f"{text} ({', '.join(roles)})" if blocks[0].named_roles else text)
        return ", ".join(parts)


def describe_model(diffusion_model: object) -> Layout:
    """The layout of ``diffusion_model``, the module that the host calls once per forward pass."""
    diffusion_model = getattr(diffusion_model, "_orig_mod", diffusion_model)  # of torch.compile
    family = _family(diffusion_model)
    if family is None:
        return Layout(f"unknown ({type(diffusion_model).__name__})", known=False)
    return Layout(family.name, family.describe(diffusion_model))


def _family(diffusion_model: object) -> Family | None:
    # By name, so that this needs no import of the host; custom nodes subclass the host's classes.
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(diffusion_model).__mro__}
    for family in FAMILIES:
        if any(_HOST_PACKAGE + name in names for name in family.classes):
            return family
    return None


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2,5``"""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
