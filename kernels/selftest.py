"""Proof on the user's own GPU that a native kernel computes what its algorithm says.

A wrong kernel is worse than a slow one, and no test of ours has seen this GPU with this driver and
this compiler. So a native backend answers for a precision, head_dim and dtype only after a few
small calls came out as they should. That takes milliseconds, and nothing of it is kept on disk: a
proof is never older than the driver.
"""

import logging
import threading

import torch

from . import backends
from .backend import Backend
from .jit.errors import JitError
from .metrics import compare
from .reference import SCHEMES, exact_attention, reference_attention, sagebwd_attention
from .request import describe_request

log = logging.getLogger("sageattention3")

# Times the error that the algorithm in plain torch makes on the same tensors. Kernels cut their
# tiles elsewhere and round in another order, which moves the error by a tenth; faults multiply it.
MARGIN = 1.5

_Q_LEN, _KV_LEN, _Q_HEADS, _KV_HEADS = 200, 333, 4, 2  # ragged ends, several tiles, shared keys
_VISIBLE = 250  # keys of the masked call

_verdicts: dict[tuple, str | None] = {}
_proving = threading.RLock()


def fault(
    backend: str,
    precision: str,
    device: str,
    index: int | None,
    head_dim: int,
    dtype: torch.dtype,
    trainable: bool,
) -> str | None:
    """Why ``backend`` must not be used for such calls, as a clause; None once it has proved itself.

    The first call of each kind builds the kernels that it needs and runs them; later ones look up.
    Raises torch.OutOfMemoryError, which says nothing about the kernels.
    """
    key = backend, precision, device, index, head_dim, dtype, trainable
    if key not in _verdicts:
        with _proving:
            if key not in _verdicts:
                if device == "cuda" and torch.cuda.is_current_stream_capturing():
                    return f"{backend} must run once before a CUDA graph captures it"
                _verdicts[key] = _judge(backends.named(backend), *key[1:])
                if _verdicts[key]:
                    log.error("%s; other attention is used instead", _verdicts[key])
    return _verdicts[key]


# What torch.compiler.assume_constant_result does, which would import torch's compiler for it: more
# than a second of every start of ComfyUI.
fault._dynamo_marked_constant = True


def _judge(
    backend: Backend,
    precision: str,
    device: str,
    index: int | None,
    head_dim: int,
    dtype: torch.dtype,
    trainable: bool,
) -> str | None:
    place = torch.device(device) if index is None else torch.device(device, index)
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
            torch.device("cpu"),
        ):
            wrong = backend.proof(place, head_dim, dtype) if backend.proof else None
            if wrong:
                return f"{backend.name} failed its self-test: {wrong}"
            for name, tensors, options in _calls(head_dim, dtype, place):
                request = describe_request(
                    *tensors, precision=precision, trainable=trainable, **options
                )
                if backend.objection(request):
                    continue  # such calls never reach it
                if trainable:
                    wrong = _try_training(backend, tensors, options)
                else:
                    wrong = _try(backend, precision, tensors, options)
                if wrong:
                    kind = "training, " if trainable else ""
                    kind += f"{precision}, head_dim {head_dim}, {str(dtype).removeprefix('torch.')}"
                    return f"{backend.name} failed its self-test ({name} call, {kind}): {wrong}"
    except JitError as error:
        return f"{backend.name} could not be built: {error}"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # what the driver and torch raise
        return f"{backend.name} failed its self-test: {error}"
    return None


def _calls(head_dim: int, dtype: torch.dtype, device: torch.device):
    """(name, (q, k, v), options) of the calls; K and V have the biased channels of real models."""
    generator = torch.Generator().manual_seed(0)

    def random(heads, tokens):
        return torch.randn(1, tokens, heads, head_dim, generator=generator)

    q, k, v = random(_Q_HEADS, _Q_LEN), random(_KV_HEADS, _KV_LEN), random(_KV_HEADS, _KV_LEN)
    k[..., :2] += 8
    v[..., -2:] -= 4
    poisoned_k, poisoned_v = k.clone(), v.clone()
    poisoned_k[:, _VISIBLE:], poisoned_v[:, _VISIBLE:] = 1000, -1000
    mask = (torch.arange(_KV_LEN) < _VISIBLE).expand(1, 1, _Q_LEN, -1).clone()
    mask[:, :, 7] = False  # a query that sees nothing

    def ready(*tensors):
        return tuple(x.to(device, dtype).transpose(1, 2) for x in tensors)

    nothing = {"mask": None, "causal": False}
    yield "plain", ready(q, k, v), nothing
    yield "causal", ready(q, k, v), {**nothing, "causal": True}
    yield "masked", ready(q, poisoned_k, poisoned_v), {**nothing, "mask": mask.to(device)}


def _try(backend: Backend, precision: str, tensors, options) -> str | None:
    """What is wrong with one call; None if nothing is."""
    scale = tensors[0].shape[-1] ** -0.5
    out = backend.forward(*tensors, precision=precision, scale=scale, **options)
    if not out.isfinite().all():
        return "it answers with NaN or infinity"
    again = backend.forward(*tensors, precision=precision, scale=scale, **options)
    if not torch.equal(out, again):
        return "it answers differently each time"
    right = exact_attention(*tensors, scale=scale, **options)
    emulated = reference_attention(*tensors, scheme=SCHEMES[precision], scale=scale, **options)
    error, expected = compare(out, right), compare(emulated, right)
    if error.rel_l1 > MARGIN * expected.rel_l1:
        return f"a relative L1 error of {error.rel_l1:.3f} where {expected.rel_l1:.3f} is right"
    return None


def _try_training(backend: Backend, tensors, options) -> str | None:
    """The same for the output and the three gradients of the differentiable form."""
    options = {**options, "scale": tensors[0].shape[-1] ** -0.5}
    mine, again, right, plain = (
        _gradients(function, tensors, options)
        for function in (backend.train, backend.train, exact_attention, sagebwd_attention)
    )
    for name in mine:
        if not mine[name].isfinite().all():
            return f"its {name} has NaN or infinity"
        if not torch.equal(mine[name], again[name]):
            return f"its {name} is different each time"
        error, expected = compare(mine[name], right[name]), compare(plain[name], right[name])
        if error.rel_l1 > MARGIN * expected.rel_l1:
            return (
                f"a relative L1 error of {error.rel_l1:.3f} in its {name} "
                f"where {expected.rel_l1:.3f} is right"
            )
    return None


def _gradients(function, tensors, options) -> dict[str, torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    generator = torch.Generator().manual_seed(1)
    with torch.enable_grad():
        out = function(*leaves, **options)
        upstream = torch.randn(out.shape, generator=generator).to(tensors[0])
        out.backward(upstream.to(out.dtype))
    return {
        "output": out.detach(),
        **dict(zip(("dQ", "dK", "dV"), (x.grad for x in leaves), strict=True)),
    }
