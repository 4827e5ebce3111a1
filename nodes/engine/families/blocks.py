"""What a family adapter describes: blocks, in the order in which a forward pass reaches them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# What a call attends to, as layer ids spell it. `joint`: image and text tokens in one sequence.
JOINT = ("joint",)
SELF = ("self",)
SELF_CROSS = ("self", "cross")

# Roles whose keys come from another sequence than the queries. The role `cross` of a selector
# and the cross-attention policy mean all of them.
CROSS_ROLES = frozenset({"cross", "image", "text", "audio", "time_cross"})


class LayerCall(NamedTuple):
    """One attention call, named."""

    id: str
    role: str
    stable: bool  # the name is still right when gradient checkpointing recomputes the call

    @property
    def is_cross(self) -> bool:
        return self.role in CROSS_ROLES


@dataclass(frozen=True)
class Block:
    """One transformer block and the attention calls that it makes, in order."""

    stack: str
    index: tuple[int, ...]
    roles: tuple[str, ...]
    named_roles: bool  # layer ids end in the role
    hook: tuple[str, int] | None = None  # its key in patches_replace["dit"], if the host has one
    hook_checkpoints: bool = False  # hooked, the host runs it under torch.utils.checkpoint
    key: tuple | None = None  # how the host's own block keys name it, where it sets them
    main: bool = True  # False: beside the main stacks (refiners, side networks)
    repeats: bool = False  # may run several times in a row, a number the layout can't know
    optional: tuple[tuple[str, str], ...] = ()  # (role, condition that the model input must have)

    @property
    def id(self) -> str:
        return ".".join((self.stack, *map(str, self.index)))

    @cached_property
    def layers(self) -> tuple[LayerCall, ...]:
        stable = self.hook is not None
        return tuple(LayerCall(self.layer_id(role), role, stable) for role in self.roles)

    def layer_id(self, role: str) -> str:
        return f"{self.id}.{role}" if self.named_roles else self.id

    def layers_given(self, conditions: frozenset[str]) -> tuple[LayerCall, ...]:
        """The calls it makes when the model input has ``conditions``."""
        if not self.optional:
            return self.layers
        missing = {role for role, condition in self.optional if condition not in conditions}
        return tuple(layer for layer in self.layers if layer.role not in missing)


Roles = tuple[str, ...] | Callable[[object], tuple[str, ...]]


@dataclass(frozen=True)
class Stack:
    """A list of alike blocks: one row of the family table."""

    name: str
    modules: str  # where the list is: attributes of the diffusion model, dotted
    roles: Roles = JOINT  # of every block, or a function of the block's module
    hook: str | None = None  # kind of its blocks in patches_replace["dit"]
    hook_checkpoints: bool = False
    key: str | None = None  # host's block_type where that is not the hook's kind
    main: bool = True
    repeats: bool = False
    optional: tuple[tuple[str, str], ...] = ()

    def blocks(self, model: object) -> Iterator[Block]:
        for i, module in enumerate(children(model, self.modules)):
            roles = self.roles(module) if callable(self.roles) else self.roles
            kind = self.key or (self.hook.removesuffix("_block") if self.hook else None)
            yield Block(
                stack=self.name,
                index=(i,),
                roles=roles,
                named_roles=callable(self.roles)
                or len(self.roles) > 1
                or self.roles[0] in CROSS_ROLES,
                hook=(self.hook, i) if self.hook else None,
                hook_checkpoints=self.hook_checkpoints,
                key=(kind, i) if kind else None,
                main=self.main,
                repeats=self.repeats,
                optional=tuple(pair for pair in self.optional if pair[0] in roles),
            )


def children(model: object, path: str) -> list:
    """The modules of the list (or dict) at ``path``."""
    for name in path.split("."):
        model = getattr(model, name)
    return list(model.values()) if hasattr(model, "values") else list(model)


@dataclass(frozen=True)
class Family:
    """One architecture of the host: its classes and how to read its blocks from an instance."""

    name: str
    classes: tuple[str, ...]  # dotted names under comfy.ldm; subclasses count too
    describe: Callable[[object], tuple[Block, ...]]


def in_order(*stacks: Stack) -> Callable[[object], tuple[Block, ...]]:
    """Stacks that run one after the other."""

    def describe(model: object) -> tuple[Block, ...]:
        return tuple(block for stack in stacks for block in stack.blocks(model))

    return describe
