"""A small grid of calls for compute-sanitizer, under which the whole of the GPU tests takes hours:

compute-sanitizer --tool memcheck python tests/gpu/small_grid.py [NAME ...]
compute-sanitizer --tool racecheck python tests/gpu/small_grid.py [NAME ...]

racecheck names hazards in sm90_sagebwd that are none: docs/kernel-notes-sagebwd.md.
"""

import importlib.util
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "pack_loader", Path(__file__).resolve().parents[2] / "demo" / "pack.py"
)
_loader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_loader)
_loader.load_pack()

import torch  # noqa: E402
from sageattention3.kernels import attention, attention_trainable, explain  # noqa: E402
from sageattention3.kernels.launch import sm80_sagebwd  # noqa: E402
from sageattention3.kernels.metrics import compare  # noqa: E402
from sageattention3.kernels.reference import exact_attention  # noqa: E402


def through_api(precision: str, backend: str, *given, **options) -> torch.Tensor | None:
    """None for masks and head dims that the backend leaves to others."""
    trainable = given[0].requires_grad
    decision = explain(*given, precision=precision, trainable=trainable, backend=backend, **options)
    if decision.backend is None:
        return None
    if trainable:
        return attention_trainable(*given, backend=backend, **options)
    return attention(*given, precision=precision, backend=backend, **options)


def by_sm80_sagebwd(q, k, v, *, mask=None, causal=False) -> torch.Tensor | None:
    """These kernels are called as they are, as no backend offers them."""
    d = q.shape[-1]
    if d > max(sm80_sagebwd.HEAD_DIMS):
        return None
    return sm80_sagebwd.train(q, k, v, mask=mask, scale=d**-0.5, causal=causal)


# name: what computes a call, whether gradients are asked for, the largest relative L1 of the output
GRID = {
    "sm80_int8": (partial(through_api, "int8", "sm80_int8"), False, 0.03),
    "sm90_int8": (partial(through_api, "int8", "sm90_int8"), False, 0.03),
    "fp4": (partial(through_api, "fp4", "emulated_fp4"), False, 0.25),
    "int8_fp4": (partial(through_api, "int8_fp4", "emulated_int8_fp4"), False, 0.2),
    "sm80_sagebwd": (by_sm80_sagebwd, True, 0.03),
    "sm90_sagebwd": (partial(through_api, "int8", "sm90_sagebwd"), True, 0.03),
}
SIZES = (  # b, hq, hk, nq, nk, d
    (1, 2, 1, 70, 300, 128),
    (2, 2, 2, 129, 129, 64),
    (1, 3, 1, 200, 65, 96),
    (1, 1, 1, 40, 200, 256),
    (1, 1, 1, 1, 1, 128),
    # So long that every stage of shared memory is used again.
    (1, 1, 1, 500, 40, 64),
    (1, 1, 1, 40, 1100, 64),
    (1, 1, 1, 40, 1100, 128),
)


def calls() -> Iterator[tuple[list[torch.Tensor], dict]]:
    """q, k, v and options of each call."""
    generator = torch.Generator("cuda").manual_seed(0)
    for b, hq, hk, nq, nk, d in SIZES:
        shapes = ((b, n, h, d) for h, n in ((hq, nq), (hk, nk), (hk, nk)))
        qkv = [
            torch.randn(shape, generator=generator, device="cuda").bfloat16().transpose(1, 2)
            for shape in shapes
        ]
        mask = torch.rand(b, 1, nq, nk, generator=generator, device="cuda") < 0.6
        mask[..., 0] = True
        for options in ({}, {"causal": True}, {"mask": mask}):
            yield qkv, options


def run(name: str) -> int:
    """Makes every call that ``name`` takes; returns how many those were."""
    compute, trainable, bar = GRID[name]
    taken = 0
    for qkv, options in calls():
        out = compute(*(x.detach().requires_grad_(trainable) for x in qkv), **options)
        if out is None:
            continue
        if trainable:
            out.float().square().sum().backward()
        errors = compare(out.detach(), exact_attention(*qkv, **options))
        assert errors.finite, (name, qkv[0].shape, options, errors)
        assert errors.rel_l1 < bar, (name, qkv[0].shape, options, errors)
        taken += 1
    return taken


def main(names: list[str]) -> None:
    for name in names or GRID:
        taken = run(name)
        assert taken, f"{name} took no call"
        print(f"{name}: {taken} calls", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
