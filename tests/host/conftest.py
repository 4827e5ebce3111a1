"""ComfyUI in this process, for every test in this folder."""

import pytest
import torch
from sageattention3.demo import host

host.import_comfy()


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)
