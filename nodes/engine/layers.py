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
from .layout import Layout

__all__ = ["OTHER", "STATE_KEY", "BlockState", "ForwardState", "LayerCall", "LayerTracker"]

# Where transformer_options carry what this module knows: a BlockState within a hooked block, a
# ForwardState elsewhere. The only key that this module adds.
STATE_KEY = "sageattention3"
OTHER = "other"  # id of all calls that the layout does not foresee


class BlockState:
    """One run of one hooked block, carried in that block's own copy of transformer_options.

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

    def __init__(self, known: bool, blocks: list[tuple[Block, tuple[LayerCall, ...]]]):
        self.known = known
        # All in plain containers: traced code reads them, and torch.compile can't enter the lock
        # that cached_property takes.
        self.order = [layer for _, layers in blocks for layer in layers]
        self.keyed = {block.key: layers for block, layers in blocks if block.key}
        self.in_block = dict.fromkeys(self.keyed, 0)
        self.expect(0, len(self.order), repeats=False)

    def expect(self, start: int, stop: int, repeats: bool) -> None:
        """Calls outside hooked blocks are order[start:stop] from here on, over again if repeats."""
        self.start, self.stop, self.repeats = start, stop, repeats
        self.calls = 0

    def identify(self, options: dict, q_len: int, kv_len: int) -> LayerCall:
        # Once hooks have run, keys are no use: calls beside the hooked blocks see stale ones.
        key = _host_key(options) if self.start == 0 else None
        layer = self._keyed(key, options) if key in self.keyed else self._counted()
        if layer is None:
            return _stranger(OTHER, q_len, kv_len)
        if not self.known:
            return _stranger(layer.id, q_len, kv_len)
        return LayerCall(layer.id, layer.role, False)

    def _keyed(self, key: tuple, options: dict) -> LayerCall | None:
        replaced = _replaced_roles(options, key)
        layers = [layer for layer in self.keyed[key] if layer.role not in replaced]
        n = self.in_block[key]
        self.in_block[key] = n + 1
        return layers[n % len(layers)] if layers else None

    def _counted(self) -> LayerCall | None:
        n = self.calls
        self.calls += 1
        if not self.known:
            return LayerCall(f"call.{n}", "", False)
        if self.repeats:
            n %= self.stop - self.start
        return self.order[self.start + n] if self.start + n < self.stop else None


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
        given = frozenset(conditions)
        blocks = [(block, block.layers_given(given)) for block in self.layout.order]
        state = ForwardState(self.layout.known, blocks)
        options = {**transformer_options, STATE_KEY: state}
        replace = options.get("patches_replace", {})
        dit = dict(replace.get("dit", {}))

        # From the last block to the first, so that the calls between a hooked block and the next
        # one are known when the former is hooked.
        start = stop = len(state.order)
        repeats = False
        for block, layers in reversed(blocks):
            if _takes_hook(block, dit):
                decision = decide(layers) if decide else None
                leave = (start, stop, repeats)
                dit[block.hook] = _hook(layers, decision, state, leave, dit.get(block.hook))
                stop = start - len(layers)
            start -= len(layers)
            repeats = block.repeats
        if dit:
            options["patches_replace"] = {**replace, "dit": dit}
        return options

    def identify(self, transformer_options: dict, q_len: int, kv_len: int) -> LayerCall:
        """Name the call that came with ``transformer_options``. Counts: ask once per call.

        A call that the layout does not foresee (another node's patch made it) is ``other``.
        """
        state = transformer_options.get(STATE_KEY)
        if isinstance(state, BlockState):
            return state.layers[state.position(q_len, kv_len)]
        if state is None:  # not from a forward that begin_forward opened
            return _stranger(OTHER, q_len, kv_len)
        return state.identify(transformer_options, q_len, kv_len)


def _takes_hook(block: Block, replaced: dict) -> bool:
    if block.hook is None:
        return False
    # The host runs hooked blocks of some families under torch.utils.checkpoint. Where nothing else
    # hooks them already that is only worth it for training: counting is as good while sampling, and
    # torch.compile allows no side effect under a checkpoint.
    return not block.hook_checkpoints or block.hook in replaced or torch.is_grad_enabled()


def _hook(
    layers: tuple[LayerCall, ...],
    decision: Hashable,
    forward: ForwardState,
    leave: tuple[int, int, bool],
    previous: Callable | None,
) -> Callable[[dict, dict], Any]:
    def run_block(args: dict, extra: dict) -> Any:
        options = args.get("transformer_options")
        if options is not None:  # else the host hides this block's attention from overrides
            options = {**options, STATE_KEY: BlockState(layers, decision)}
            args = {**args, "transformer_options": options}
        out = previous(args, extra) if previous else extra["original_block"](args)
        forward.expect(*leave)
        return out

    return run_block


def _stranger(name: str, q_len: int, kv_len: int) -> LayerCall:
    """A call of which only the lengths tell what it may be."""
    return LayerCall(name, "self" if q_len == kv_len else "cross", False)


def _host_key(options: dict) -> tuple | None:
    if "block" in options:  # UNet: ("input", 4), and the index within the spatial transformer
        return (*options["block"], options.get("block_index", 0))
    if "block_type" in options and "block_index" in options:
        return options["block_type"], options["block_index"]
    return None


def _replaced_roles(options: dict, key: tuple) -> set[str]:
    """Roles of a UNet block that another node computes itself (PAG, IPAdapter): no call comes."""
    replace = options.get("patches_replace", {})
    roles = set()
    for name, role in (("attn1", "self"), ("attn2", "cross")):
        functions = replace.get(name, {})
        # As in the host: a function may stand for one transformer or for all of a block.
        if key in functions or key[:2] in functions:
            roles |= {role, f"time_{role}"}
    return roles
