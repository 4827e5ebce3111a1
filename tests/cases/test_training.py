"""Training through a patched model: no gradient is cut, no recompute decides anew, no NaN."""

import pytest
import torch
from sageattention3.kernels import attention_trainable
from sageattention3.kernels.metrics import compare
from torch.utils.checkpoint import checkpoint

from .calls import Patched, core_attention, exact, tensors

HEADS, WIDTH = 2, 64


class Block(torch.nn.Module):
    """Attention with LoRA on its four projections; the base weights are frozen."""

    def __init__(self, rank=4, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape):
            return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

        names = ("q", "k", "v", "out")
        self.base = {name: weight(WIDTH, WIDTH) for name in names}
        self.down = torch.nn.ParameterDict({n: weight(rank, WIDTH) for n in names})
        self.up = torch.nn.ParameterDict({n: torch.zeros(WIDTH, rank) for n in names})

    def project(self, name, x):
        return x @ self.base[name].T + x @ self.down[name].T @ self.up[name].T

    def forward(self, x, attend):
        q, k, v = (self.project(name, x) for name in ("q", "k", "v"))
        return x + self.project("out", attend(q, k, v, HEADS))


def tokens(n=97, seed=1):
    return torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(seed))


def up_gradients(block):
    return {name: p.grad.clone() for name, p in block.up.items()}


# ------------------------------------------------------------------------- QA-40: cut gradients
@pytest.mark.parametrize("precision", ["fp4", "int8_fp4", "int8"])
def test_every_projection_is_trained_whatever_the_patch_says(precision):
    """QA-40: with a forward-only kernel q, k and v got no gradient, and the loss still fell."""
    call, block = Patched.everywhere(precision), Block()
    block(tokens(), call).square().mean().backward()
    reference = Block()
    reference(tokens(), core_attention()).square().mean().backward()
    for name, gradient in up_gradients(block).items():
        assert gradient.isfinite().all()
        assert compare(gradient, reference.up[name].grad).cosine > 0.99, name
    assert call.precisions == ["int8" if precision == "int8" else "fp16"]


def test_a_preview_within_training_is_quantised_and_training_goes_on_after_it():
    """QA-40: torch.no_grad() around a preview allows inference kernels, for as long."""
    call, block = Patched.everywhere("fp4"), Block()
    block(tokens(), call)
    with torch.no_grad():
        block(tokens(), call)
    block(tokens(), call).square().mean().backward()
    assert call.precisions == ["fp16", "fp4", "fp16"]
    assert all(gradient.abs().sum() > 0 for gradient in up_gradients(block).values())


# ------------------------------------------------------------------------------ QA-42: recompute
@pytest.mark.parametrize("precision", ["fp4", "int8"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("n", [97, 136])
def test_a_checkpoint_takes_the_same_decision_again(precision, use_reentrant, n):
    """QA-42: another decision in the recompute fails, or gives other gradients in silence."""
    upstream = torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(2))
    gradients = []
    for checkpointed in (False, True):
        call, block = Patched.everywhere(precision), Block()
        x = tokens(n).requires_grad_()
        if checkpointed:
            out = checkpoint(block, x, call, use_reentrant=use_reentrant)
        else:
            out = block(x, call)
        # A linear loss: reentrant checkpoints run their first pass without gradients, through the
        # inference kernels, and only what they recompute is differentiated.
        (out * upstream).sum().backward()
        gradients.append([x.grad, *up_gradients(block).values()])
        assert len(call.precisions) == 1, "a recompute is not counted again"
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# -------------------------------------------------------------------- QA-43: dtypes and magnitudes
def gradients_of(q, k, v, d_out):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    attention_trainable(q, k, v).backward(d_out)
    return q.grad, k.grad, v.grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masked_loss_tokens_give_exactly_zero(dtype):
    """QA-43: a group of zeros has the scale zero, and 0 / 0 is NaN."""
    q, k, v = tensors(dtype=dtype)
    for gradient in gradients_of(q, k, v, torch.zeros_like(q)):
        assert gradient.dtype == dtype
        assert (gradient == 0).all()


@pytest.mark.parametrize("magnitude", [1e-8, 1e-4, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_keep_their_direction_at_any_magnitude(magnitude, dtype):
    """QA-43: the scale of a loss must not decide whether its gradient survives quantisation."""
    q, k, v = tensors(spread=1.0, dtype=dtype)
    d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).to(dtype) * magnitude
    reference = [x.double().requires_grad_() for x in (q, k, v)]
    exact(*reference).backward(d_out.double())
    bars = (0.99, 0.99, 0.995)
    for mine, ref, bar in zip(gradients_of(q, k, v, d_out), reference, bars, strict=True):
        assert mine.isfinite().all()
        assert compare(mine, ref.grad).cosine > bar


def test_a_few_large_rows_do_not_silence_the_rest():
    """QA-43: dO of 1e-4 with a few rows of 1.0; rows far from the large ones keep a gradient."""
    q, k, v = tensors(nq=256, spread=1.0, dtype=torch.bfloat16)
    d_out = torch.full(q.shape, 1e-4, dtype=torch.bfloat16)
    d_out *= torch.randn(q.shape, generator=torch.Generator().manual_seed(4)).sign()
    d_out[:, :, :2] = 1.0
    d_q, d_k, d_v = gradients_of(q, k, v, d_out)
    assert all(x.isfinite().all() for x in (d_q, d_k, d_v))
    assert (d_q[:, :, 128:].abs().amax((-1, -2)) > 0).all()


def test_flushed_and_overflowing_gradients_make_no_nan_of_their_own():
    """QA-43: FP16 flushes 1e-8 to zero; a GradScaler's overflow is infinite, which it looks for."""
    q, k, v = tensors(dtype=torch.float16)
    flushed = torch.full_like(q, 1e-8)
    assert all(x.isfinite().all() for x in gradients_of(q, k, v, flushed))
    overflowing = torch.randn(q.shape).half() * 60000
    assert overflowing.isinf().any()
    assert not all(x.isfinite().all() for x in gradients_of(q, k, v, overflowing))


def test_a_lora_learns_as_well_as_in_16_bits():
    """QA-43: a 200-step run ends within 2 % of the loss of the host's attention."""
    target = Block(seed=5)
    for parameter in target.up.values():
        parameter.data.normal_(generator=torch.Generator().manual_seed(6)).mul_(0.3)
    with torch.no_grad():
        wanted = target(tokens(64), core_attention())
    losses = {}
    for name, attend in (("host", core_attention()), ("int8", Patched.everywhere("int8"))):
        block = Block(seed=5)
        optimiser = torch.optim.AdamW(block.parameters(), lr=3e-3)
        for _ in range(200):
            optimiser.zero_grad()
            loss = (block(tokens(64), attend) - wanted).square().mean()
            loss.backward()
            optimiser.step()
        losses[name] = loss.item()
    start = (tokens(64) - wanted).square().mean().item()
    assert losses["host"] < 0.2 * start, "the toy is learnt at all"
    assert abs(losses["int8"] - losses["host"]) < 0.02 * start
