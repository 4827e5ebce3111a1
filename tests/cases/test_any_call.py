"""Calls in every combination of the host's argument forms, drawn at random (QA-19)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sageattention3.kernels.metrics import compare

from .calls import Patched, core_attention, packed

pytestmark = pytest.mark.host

# As models leave them: views of joined projections, of expanded batches, of longer sequences.
MEMORY = {
    "plain": lambda x: x,
    "token-major": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "slice of a longer one": lambda x: torch.cat((x, x), dim=2)[:, :, : x.shape[2]],
    "one of three": lambda x: torch.stack((x, x, x), dim=3)[:, :, :, 1],
    "odd start": lambda x: torch.cat((x[..., :1], x), dim=-1)[..., 1:],
}


@st.composite
def calls(draw):
    """(args, kwargs) of one call that the host's own attention takes."""
    sizes = st.integers(1, 40)
    batch, heads, q_len = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(sizes)
    kv_len = draw(st.one_of(st.just(q_len), sizes))
    head_dim = draw(st.sampled_from([1, 8, 20, 40, 64, 72, 96]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    scale = draw(st.sampled_from([0.0, 0.01, 1.0, 2.0]))

    def tensor(tokens):
        x = torch.randn(batch, heads, tokens, head_dim, generator=generator) * scale
        return draw(st.sampled_from(sorted(MEMORY.items())))[1](x.to(dtype))

    q, k, v = tensor(q_len), tensor(kv_len), tensor(kv_len)
    flags = {}
    if draw(st.booleans()):
        flags["skip_reshape"] = True
    else:
        q, k, v = packed(q), packed(k), packed(v)
    if draw(st.booleans()):
        flags["skip_output_reshape"] = True
    mask = draw(st.sampled_from([None, "bool", "additive"]))
    if mask is not None:
        shapes = [(q_len, kv_len), (batch, q_len, kv_len), (1, 1, 1, kv_len)]
        shape = draw(st.sampled_from([*shapes, (batch, heads, q_len, kv_len)]))
        hidden = torch.rand(shape, generator=generator) < 0.4
        hidden[..., 0] = False  # a row that sees nothing is NaN in torch
        additive = torch.zeros(shape, dtype=dtype).masked_fill(hidden, -torch.inf)
        mask = ~hidden if mask == "bool" else additive
    if draw(st.booleans()):
        flags["a_flag_of_a_newer_host"] = draw(st.booleans())
    if draw(st.booleans()):
        return (q, k, v, heads, mask), flags
    return (q, k, v), {"heads": heads, "mask": mask, **flags}


@settings(max_examples=100)
@given(calls())
def test_any_call_gives_what_the_host_gives_in_its_form_and_changes_nothing(call):
    args, kwargs = call
    before = [x.clone() for x in args if torch.is_tensor(x)]
    expected = core_attention()(*args, **kwargs)
    patched = Patched.everywhere("int8")
    out = patched(*args, **kwargs)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert patched.precisions == ["int8"], patched.reasons
    # Axes, masks or scales mixed up give about 1; how exact INT8 is has tests of its own. Results
    # near zero drown in the host's own error in 16 bits.
    error = compare(out.double(), expected.double())
    size = expected.double().abs().mean().item()
    assert error.finite
    assert error.rel_l1 < 0.2 or size < 1e-3
    after = [x for x in args if torch.is_tensor(x)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
