"""What models hand over is read where it lies; what they get back is laid out as they want it."""

import functools

import pytest
import torch
from sageattention3.demo import sampling, tiny
from sageattention3.demo.sampling import SAMPLED
from sageattention3.kernels.backend import token_major_like
from sageattention3.kernels.launch.operands import VECTOR_BYTES, in_vectors
from sageattention3.nodes.engine.attach import set_override
from sageattention3.nodes.engine.call import read_call

pytestmark = pytest.mark.host

ITEMSIZE = torch.bfloat16.itemsize  # of models as they are used; these are FP32


@functools.cache
def calls_of(family: str) -> list:
    """The attention calls of a forward pass."""
    seen = []

    def override(func, *args, **kwargs):
        seen.append(read_call(*args, **kwargs))
        return func(*args, **kwargs)

    model = tiny.model(family).clone()
    model.model_options.setdefault("transformer_options", {})
    set_override(model, override)
    sampling.sample(model, family, steps=1)
    return seen


@pytest.mark.parametrize("family", SAMPLED)
def test_kernels_read_a_models_tensors_without_a_copy(family):
    for call in calls_of(family):
        for x in (call.q, call.k, call.v):
            assert in_vectors(x.shape, x.stride(), ITEMSIZE), (x.shape, x.stride())
            assert x.storage_offset() * ITEMSIZE % VECTOR_BYTES == 0


@pytest.mark.parametrize("family", SAMPLED)
def test_the_output_of_kernels_takes_the_hosts_form_without_a_copy(family):
    for call in calls_of(family):
        out = token_major_like(call.q)
        assert call.finish(out).data_ptr() == out.data_ptr()
