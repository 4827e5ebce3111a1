"""Who is calling? Gives every attention call of a forward pass the id of its layer.

Three ways, best first:

1. Blocks that the host runs through ``patches_replace["dit"]`` get their own copy of
   transformer_options with a :class:`BlockState` in it. The copy is an argument of the block, so
   gradient checkpointing recomputes the block with the same copy: the identity is *stable*.
2. The host's own block keys in transformer_options. The host changes them in place as it goes, so a
   recompute reads those of the last block: right while sampling, not stable.
3. Counting. Call order is fixed per family, and the count lives in the options of one forward.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from .families import Block, LayerCall
from .layout import Layout, describe_model

__all__ = ["STATE_KEY", "BlockState", "LayerCall", "LayerTracker", "Layout", "describe_model"]

# Where transformer_options carry what this module knows: a BlockState within a hooked block, a
# ForwardState elsewhere. The only key that this module adds.
STATE_KEY = "sageattention3"

_OTHER = "other"  # a call that the layout does not foresee, made by another node's patch


class BlockState:
    """One run of one block, carried in that block's own copy of transformer_options.

    ``decision`` is what ``decide`` answered for the block. Traced code that reads only ``decision``
    and :meth:`position` compiles once for all blocks that share a decision: torch.compile guards on
    what it reads, and layer ids, read in a block compiled alone, would mean one graph per block.
    """

    def __init__(self, layers: tuple[LayerCall, ...], decision: Hashable):
        self.layers = layers
        self.decision = decision
        self.calls = 0
        self.lengths: list[tuple[int, int]] = []

    def position(self, q_len: int, kv_len: int) -> int:
        """Which of the block's calls this is. Counts, so ask once per call."""
        if len(self.layers) == 1:
            return 0
        n = self.calls
        self.calls += 1
        if n < len(self.layers):
            self.lengths.append((q_len, kv_len))
            return n
        # A recompute. Checkpoints smaller than the block recompute its calls in reverse order, so
        # lengths that name a call are better than its turn.
        same = [i for i, seen in enumerate(self.lengths) if seen == (q_len, kv_len)]
        return same[0] if len(same) == 1 else n % len(self.layers)


class ForwardState:
    """Counts of one forward pass, for the calls made outside hooked blocks."""

    def __init__(self, layout: Layout, conditions: frozenset[str]):
        self.layout = layout
        self.conditions = conditions
        self.order = [
            (block, layer) for block in layout.order for layer in block.layers_given(conditions)
        ]
        self.start = 0  # in `order`: after the hooked block that ran last
        self.calls = 0  # outside hooked blocks, since then
        self.in_block: dict[Block, int] = {}

    def leave(self, block: Block) -> None:
        """A hooked block is done."""
        last = max(i for i, (other, _) in enumerate(self.order) if other is block)
        self.start, self.calls = last + 1, 0

    def identify(self, options: dict, q_len: int, kv_len: int) -> LayerCall:
        block = self.layout.keyed.get(_host_key(options)) if not self.start else None
        layer = self._keyed(block, options) if block else self._counted()
        # Training may call this again in a recompute, where keys and counts are wrong. Lengths are
        # the same then, so what depends on the role alone stays as the forward pass decided it.
        if not layer.role or torch.is_grad_enabled():
            layer = layer._replace(role="self" if q_len == kv_len else "cross")
        return layer._replace(stable=False)

    def _keyed(self, block: Block, options: dict) -> LayerCall:
        replaced = _replaced_roles(options)
        layers = [x for x in block.layers_given(self.conditions) if x.role not in replaced]
        n = self.in_block.get(block, 0)
        self.in_block[block] = n + 1
        return layers[n % len(layers)] if layers else LayerCall(_OTHER, "", False)

    def _counted(self) -> LayerCall:
        n = self.calls
        self.calls += 1
        if not self.layout.known:
            return LayerCall(f"call.{n}", "", False)
        if not self.start:
            run = self.order
        else:
            run = []
            for block, layer in self.order[self.start :]:
                if block.hook:
                    break
                run.append((block, layer))
            if run and run[0][0].repeats:
                n %= len(run)
        return run[n][1] if n < len(run) else LayerCall(_OTHER, "", False)


class LayerTracker:
    """Names the attention calls of one model's forward passes.

    Keeps nothing between forwards and nothing in the model: all state is in the options that
    :meth:`begin_forward` returns, so clones, threads and interrupted runs can't mix.
    """

    def __init__(self, layout: Layout):
        self.layout = layout

    def begin_forward(
        self,
        transformer_options: dict,
        conditions: Iterable[str] = (),
        decide: Callable[[tuple[LayerCall, ...]], Hashable] | None = None,
    ) -> dict:
        """Options for one forward pass: a copy with identity in it; the argument is not changed.

        To be called right before the model runs (in an APPLY_MODEL wrapper): replace functions that
        are there by then are wrapped, not lost, whichever node installed them and when.

        conditions: names of the model inputs that are given (keyword arguments of apply_model that
        are not None): some calls happen only with ``ref_latents`` or ``audio_embed``.
        decide: asked once per hooked block for :attr:`BlockState.decision`.
        """
        state = ForwardState(self.layout, frozenset(conditions))
        options = dict(transformer_options)
        options[STATE_KEY] = state
        hooked = [block for block in self.layout.order if block.hook]
        if hooked:
            replace = dict(options.get("patches_replace", {}))
            dit = dict(replace.get("dit", {}))
            for block in hooked:
                layers = block.layers_given(state.conditions)
                decision = decide(layers) if decide else None
                dit[block.hook] = _hook(block, layers, decision, state, dit.get(block.hook))
            replace["dit"] = dit
            options["patches_replace"] = replace
        return options

    def identify(self, transformer_options: dict, q_len: int, kv_len: int) -> LayerCall:
        """Name the call that came with ``transformer_options``. Counts: ask once per call."""
        state = transformer_options.get(STATE_KEY)
        if isinstance(state, BlockState):
            return state.layers[state.position(q_len, kv_len)]
        if state is None:  # not from a forward that begin_forward opened
            return LayerCall(_OTHER, "self" if q_len == kv_len else "cross", False)
        return state.identify(transformer_options, q_len, kv_len)


def _hook(
    block: Block,
    layers: tuple[LayerCall, ...],
    decision: Hashable,
    forward: ForwardState,
    previous: Callable | None,
) -> Callable[[dict, dict], Any]:
    def run_block(args: dict, extra: dict) -> Any:
        options = args.get("transformer_options")
        if options is not None:  # else the host hides this block's attention from overrides
            options = {**options, STATE_KEY: BlockState(layers, decision)}
            args = {**args, "transformer_options": options}
        out = previous(args, extra) if previous else extra["original_block"](args)
        forward.leave(block)
        return out

    return run_block


def _host_key(options: dict) -> tuple | None:
    if "block" in options:  # UNet: ("input", 4), and the index within the spatial transformer
        return (*options["block"], options.get("block_index", 0))
    if "block_type" in options and "block_index" in options:
        return options["block_type"], options["block_index"]
    return None


def _replaced_roles(options: dict) -> frozenset[str]:
    """Roles of a UNet block that another node computes itself (PAG, IPAdapter): no call comes."""
    replace = options.get("patches_replace", {})
    roles = set()
    for name, role in (("attn1", "self"), ("attn2", "cross")):
        functions = replace.get(name)
        if functions and "block" in options:
            number = tuple(options["block"])
            if number in functions or (*number, options.get("block_index", 0)) in functions:
                roles |= {role, f"time_{role}"}
    return frozenset(roles)
