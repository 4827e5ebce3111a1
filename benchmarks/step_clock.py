"""Clocks around the steps of a sampler and the attention calls in them."""

import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..nodes.engine.attach import OPTION, set_override
from ..nodes.engine.call import read_call

# What a kernel does, by what its name holds; the first that fits.
KINDS = {
    "quantisation": re.compile("quantise|pack_values"),
    "attention": re.compile("sdpa|flash|fmha|attention", re.I),
    "matrix products": re.compile("gemm|nvjet|cutlass|splitk|cublas", re.I),
    "norms, rotations, activations, copies": re.compile(""),
}


class GpuMeter:
    """What a GPU tells of the work that it is given."""

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def forget_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def profile(self) -> profile:
        return profile(activities=[ProfilerActivity.CUDA])

    def kernel_seconds(self, seen: profile) -> dict[str, float]:
        """Seconds of each kernel in ``seen``, by name."""
        rows = (row for row in seen.key_averages() if row.device_type == DeviceType.CUDA)
        return {row.key: row.self_device_time_total / 1e6 for row in rows}


class StepClock:
    """Clocks one sampling run of a model: all steps but the first, which is looked into instead.

    The first step pays for whatever is built or allocated once. profiled: False leaves the kernels
    out of it, since a profiler slows launches down, even those after it. Times are in seconds.
    """

    def __init__(self, meter: Any, profiled: bool = True) -> None:
        self.meter = meter
        self.profiled = profiled
        self.steps: list[float] = []
        self.attention: list[float] = []  # of each step, within the attention calls
        self.enqueue: list[float] = []  # CPU time of each attention call
        self.kernels: dict[str, float] = {}  # of the first step, by name
        self.tokens = self.head_dim = 0  # of the call with the most queries
        self.calls = 0  # of attention, in a step
        self.attention_flops = 0  # in a step
        self.linear_flops = 0  # in a step
        self._looking = False
        self._events: list[tuple[Any, Any]] = []
        self._since = 0.0
        self._first = ExitStack()

    def on(self, model: Any) -> Any:
        """A clone of ``model`` (ModelPatcher) whose attention is clocked, whatever serves it."""
        model = model.clone()
        inner = model.model_options.setdefault("transformer_options", {}).get(OPTION)
        set_override(model, self._around(inner))
        return model

    @contextmanager
    def running(self, model: Any) -> Iterator[None]:
        """To run the sampler of ``model`` within; :meth:`stepped` must be its callback."""
        with self._first:
            for module in model.model.diffusion_model.modules():
                if isinstance(module, torch.nn.Linear):
                    self._first.callback(module.register_forward_hook(self._count_linear).remove)
            if self.profiled:
                self._profile = self._first.enter_context(self.meter.profile())
            self._looking = True
            yield

    def stepped(self, step: int, *_: Any) -> None:
        """The sampler's callback: (step, denoised latent, latent, number of steps)."""
        self.meter.wait()
        if self._looking:
            self._looking = False
            self._first.close()
            if self.profiled:
                self.kernels = self.meter.kernel_seconds(self._profile)
            self.calls = len(self._events)
            self.enqueue.clear()
        else:
            self.steps.append(time.perf_counter() - self._since)
            taken = sum(begin.elapsed_time(end) for begin, end in self._events)
            self.attention.append(taken / 1e3)
        self._events.clear()
        self._since = time.perf_counter()

    def by_kind(self) -> dict[str, float]:
        """The first step's kernels by what they do."""
        found = Counter(dict.fromkeys(KINDS, 0.0))
        for name, taken in self.kernels.items():
            found[next(kind for kind, names in KINDS.items() if names.search(name))] += taken
        return dict(found)

    def _around(self, inner: Callable | None) -> Callable[..., torch.Tensor]:
        def override(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._looking:
                self._count_attention(*args, **kwargs)
            begin, end = self.meter.event(), self.meter.event()
            begin.record()
            since = time.perf_counter()
            out = func(*args, **kwargs) if inner is None else inner(func, *args, **kwargs)
            self.enqueue.append(time.perf_counter() - since)
            end.record()
            self._events.append((begin, end))
            return out

        # With the patch's mark on it, by which the patch finds that it is still in place.
        return override if inner is None else functools.update_wrapper(override, inner)

    def _count_attention(self, *args: Any, **kwargs: Any) -> None:
        call = read_call(*args, **kwargs)
        batch, heads, tokens, head_dim = call.q.shape
        if tokens > self.tokens:
            self.tokens, self.head_dim = tokens, head_dim
        self.attention_flops += 4 * batch * heads * tokens * call.kv_len * head_dim

    def _count_linear(self, module: torch.nn.Linear, _inputs: tuple, out: torch.Tensor) -> None:
        self.linear_flops += 2 * module.in_features * out.numel()
