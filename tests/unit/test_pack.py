"""The pack's entry point as ComfyUI sees it."""

import sageattention3


def test_every_node_id_carries_the_pack_prefix_and_has_a_display_name():
    ids = sageattention3.NODE_CLASS_MAPPINGS
    assert set(ids) == set(sageattention3.NODE_DISPLAY_NAME_MAPPINGS)
    assert all(node_id.startswith("SageAttention3") for node_id in ids)
