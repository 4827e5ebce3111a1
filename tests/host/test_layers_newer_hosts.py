"""Newer hosts put block keys into transformer_options where 0.3.75 does not: ids stay the same."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from sageattention3.demo import sampling, tiny

from .watching import Watch

pytestmark = pytest.mark.host


@contextmanager
def _keys_set_before(modules, block_type: str = "double", index=lambda i: i) -> Iterator[None]:
    """What a newer host does in its loop over ``modules``: it marks the options shared by all."""
    with ExitStack() as stack:
        for i, module in enumerate(modules):

            def mark(_module, args, kwargs, i=i):
                kwargs["transformer_options"].update(block_type=block_type, block_index=index(i))

            handle = module.register_forward_pre_hook(mark, with_kwargs=True)
            stack.callback(handle.remove)
        yield


def test_lumina_refiners_stay_counted_where_main_layers_have_keys():
    watched = Watch(tiny.model("lumina2"))
    with _keys_set_before(watched.model.model.diffusion_model.layers):
        sampling.forward(watched.model, "lumina2")
    assert tuple(watched.ids) == watched.layout.layer_ids


def test_keys_tell_main_layers_apart_though_another_node_adds_calls():
    watched = Watch(tiny.model("lumina2"))
    network = watched.model.model.diffusion_model
    refine = network.noise_refiner[1].forward
    network.noise_refiner[1].forward = lambda x, *a, **k: refine(refine(x, *a, **k), *a, **k)
    with _keys_set_before(network.layers):
        sampling.forward(watched.model, "lumina2")
    assert watched.ids[-2:] == ["block.0", "block.1"]


def test_vace_blocks_are_not_taken_for_the_main_block_whose_keys_they_see():
    watched = Watch(tiny.model("wan_vace"))
    sampling.forward(watched.model, "wan_vace")
    without_keys = watched.ids.copy()
    watched.calls.clear()
    network = watched.model.model.diffusion_model
    main_of = {side: main for main, side in network.vace_layers_mapping.items()}
    with (
        _keys_set_before(network.blocks),
        _keys_set_before(network.vace_blocks, index=main_of.__getitem__),
    ):
        sampling.forward(watched.model, "wan_vace")
    assert watched.ids == without_keys


@pytest.mark.parametrize("family", ["flux", "hunyuan_video", "chroma", "qwen_image", "wan_t2v"])
def test_keys_or_counting_serve_where_another_node_drops_the_hooks(family):
    from comfy.patcher_extension import WrappersMP

    def drop_hooks(executor, *args, **kwargs):
        del args[-1]["patches_replace"]  # from transformer_options
        return executor(*args, **kwargs)

    watched = Watch(tiny.model(family))
    watched.model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "drop", drop_hooks)
    sampling.forward(watched.model, family)
    assert tuple(watched.ids) == watched.layout.layer_ids
    assert not any(call.stable for call in watched.calls)
