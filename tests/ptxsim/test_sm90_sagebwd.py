"""SageBwd on wgmma, interpreted: gradients against FP64, the same bits in any order of warps."""

from functools import partial

import pytest
import torch
from sageattention3.kernels.launch import sm90_sagebwd

from . import sagebwd_calls
from .sagebwd_calls import tensors
from .simulator import Simulator

run = partial(sagebwd_calls.gradients, sm90_sagebwd.train)
check = partial(sagebwd_calls.check, sm90_sagebwd.train)


@pytest.fixture(autouse=True)
def simulator(use):
    return use(Simulator(90))


@pytest.mark.parametrize("d", [40, 64, 104, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_head_dim_in_both_dtypes(d, dtype):
    check(*tensors(d=d, dtype=dtype))
