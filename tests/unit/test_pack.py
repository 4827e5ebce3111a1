"""The pack's entry point as ComfyUI sees it."""

import subprocess
import sys

import sageattention3
from sageattention3.demo.pack import ROOT


def test_every_node_id_carries_the_pack_prefix_and_has_a_display_name():
    ids = sageattention3.NODE_CLASS_MAPPINGS
    assert set(ids) == set(sageattention3.NODE_DISPLAY_NAME_MAPPINGS)
    assert all(node_id.startswith("SageAttention3") for node_id in ids)


def test_the_kernels_need_neither_comfyui_nor_the_nodes_nor_a_gpu():
    program = f"""
import importlib.util, sys, types
pack = types.ModuleType("pack")
pack.__path__ = [{str(ROOT)!r}]
sys.modules["pack"] = pack
import torch, pack.kernels
assert not torch.cuda.is_initialized()
foreign = [m for m in sys.modules if m.split(".")[0] in ("comfy", "nodes", "matplotlib")]
assert not foreign and "pack.nodes" not in sys.modules, foreign
q = torch.randn(1, 2, 32, 16)
print(tuple(pack.kernels.attention(q, q, q, precision="fp4").shape))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "(1, 2, 32, 16)", done.stderr
