"""Inputs that the GPU tests share."""

import torch


def tensors(b=1, hq=2, hk=None, nq=256, nk=None, d=128, dtype=torch.bfloat16, seed=0):
    """q [b, hq, nq, d], k and v [b, hk, nk, d], normal, token-major as models make them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hk, nk = hk or hq, nk or nq
    return [
        torch.randn(b, n, h, d, generator=generator, device="cuda").to(dtype).transpose(1, 2)
        for h, n in ((hq, nq), (hk, nk), (hk, nk))
    ]


def random_mask(*shape, share=0.6, seed=1):
    """bool [*shape], ``share`` of it True."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(*shape, generator=generator, device="cuda") < share


def mask_of_kind(kind, *shape):
    """A random mask of ``shape``: bool, or a bias in fp32, bf16 or fp16 that hides as much."""
    mask = random_mask(*shape)
    if kind == "bool":
        return mask
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    bias = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    return bias.masked_fill(~mask, -torch.inf).to(dtype)


def biased(x, seed, low=5.0, high=20.0):
    """``x`` with four channels per head moved by 5 to 20, as of real models' keys."""
    generator = torch.Generator().manual_seed(seed)
    x = x.clone()
    for head in range(x.shape[1]):
        for channel in torch.randperm(x.shape[-1], generator=generator)[:4]:
            size = low + (high - low) * torch.rand((), generator=generator).item()
            x[:, head, :, channel] += size * (
                1 if torch.rand((), generator=generator) > 0.5 else -1
            )
    return x
