"""Masks of every kind reach the result, and what they hide does not."""

import pytest
import torch
from sageattention3.kernels import attention
from sageattention3.kernels.metrics import compare

from .calls import QUANTISED, Patched, assert_accurate, core_attention, exact, packed, tensors

each_precision = pytest.mark.parametrize("precision", QUANTISED)

# As many batch items as heads: a (B, Nq, Nk) mask read as one per head would keep its shape.
B = H = 2
N = 96
TEXT = (20, 77)  # tokens of the two prompts of a guided batch


def random_bool(*shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[..., 0] = True  # a row that sees nothing means another thing to each attention
    return mask


def random_bias(*shape, dtype=torch.float16):
    bias = 4 * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return bias.masked_fill(~random_bool(*shape), -torch.inf).to(dtype)


def padding(kv_len=N, lengths=TEXT):
    """Bool [B, 1, 1, Nk]: item i has lengths[i] keys, the others are padding."""
    return (torch.arange(kv_len) < torch.tensor(lengths)[:, None])[:, None, None]


MASKS = {
    "bool [B,1,Nq,Nk]": random_bool(B, 1, N, N),
    "bool [1,1,N,N]": random_bool(1, 1, N, N),
    "bool [B,H,Nq,Nk]": random_bool(B, H, N, N),
    "bool [Nq,Nk]": random_bool(N, N),
    "bool [B,Nq,Nk]": random_bool(B, N, N),
    "bool [1,1,Nk]": random_bool(1, 1, N),
    "padding [B,1,1,Nk]": padding(),
    "additive [B,1,Nq,Nk]": random_bias(B, 1, N, N),
    "additive [1,1,N,N]": random_bias(1, 1, N, N),
    "additive [Nq,Nk]": random_bias(N, N),
    "additive [B,Nq,Nk]": random_bias(B, N, N),
    "additive padding": torch.zeros(B, 1, 1, N).masked_fill(~padding(), -65504).half(),
}


@pytest.mark.host
@each_precision
@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("positional", [True, False])
def test_a_mask_in_any_of_the_hosts_forms_is_obeyed(precision, form, positional):
    """QA-21: kernels without masks took the argument and dropped it."""
    mask = MASKS[form]
    q, k, v = tensors(b=B, hq=H, nq=N)
    call = (*(packed(x) for x in (q, k, v)), H)
    expected = core_attention()(*call, mask=mask)
    assert compare(core_attention()(*call), expected).rel_l1 > 0.4  # it matters, above all noise

    patched = Patched.everywhere(precision)
    out = patched(*call, mask) if positional else patched(*call, mask=mask)
    assert patched.precisions == [precision]
    assert_accurate(out, expected, precision)


# ------------------------------------------------------------------------------------------- leaks
def hidden_padding(k):
    return padding(k.shape[2]).transpose(2, 3).logical_not().expand(B, H, -1, 1)


def hidden_everywhere(k):
    """Every seventh key: in all blocks and tiles, among keys that are seen."""
    return (torch.arange(k.shape[2]) % 7 == 3)[None, None, :, None].expand(B, H, -1, 1)


def hidden_first_tile(k):
    return (torch.arange(k.shape[2]) < 64)[None, None, :, None].expand(B, H, -1, 1)


def hidden_from_one_head(k):
    hidden = hidden_everywhere(k).clone()
    hidden[:, 0] = False
    return hidden


def as_mask(hidden, kind, dtype):
    seen = ~hidden.transpose(2, 3)
    if kind == "bool":
        return seen
    low = {"-inf": -torch.inf, "-max": torch.finfo(dtype).min}[kind]
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, low)


@pytest.mark.host
@each_precision
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bool", "-inf", "-max"])
@pytest.mark.parametrize(
    "hide", [hidden_padding, hidden_everywhere, hidden_first_tile, hidden_from_one_head]
)
def test_changing_what_a_mask_hides_changes_no_bit(precision, dtype, kind, hide):
    """QA-21, metamorphic: hidden keys leak through mean(K), shared scales and block maxima."""
    q, k, v = tensors(b=B, hq=H, nq=140, nk=160, dtype=dtype)
    hidden = hide(k)
    mask = as_mask(hidden, kind, dtype)
    patched = Patched.everywhere(precision)
    out = patched(q, k, v, H, mask=mask, skip_reshape=True)
    assert_accurate(out, packed(exact(q, k, v, mask)), precision)

    noise = 3e3 * torch.randn(k.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    largest = torch.full_like(k, torch.finfo(dtype).max)
    for garbage in (noise, largest):
        k2, v2 = (torch.where(hidden, garbage, x) for x in (k, v))
        assert torch.equal(patched(q, k2, v2, H, mask=mask, skip_reshape=True), out)
    assert patched.precisions == [precision] * 3


@each_precision
def test_padded_text_is_as_good_as_text_without_padding(precision):
    """QA-21, metamorphic: 20 and 77 tokens of a guided batch, padded to one length."""
    q, k, v = tensors(b=B, hq=H, nq=140, nk=160)
    k = k + 20  # a mean over padding as well would leave most of this
    padded = attention(q, k, v, precision=precision, mask=padding(160))
    for i, length in enumerate(TEXT):
        item = [x[i : i + 1, :, :length] for x in (k, v)]
        alone = attention(q[i : i + 1], *item, precision=precision)
        noise = compare(alone, exact(q[i : i + 1], *item)).rel_l1
        difference = compare(padded[i : i + 1], alone).rel_l1
        assert difference < 0.1 * noise
