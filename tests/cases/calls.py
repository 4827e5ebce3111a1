"""What the cases share: tensors, an FP64 reference, and a patched model's attention call.

A case is a failure that users of quantised attention met or may meet. Its number (QA-02 ...) stands
in the docstring of the tests that keep it from happening here.
"""

from functools import cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F  # noqa: N812
from sageattention3.demo import host
from sageattention3.kernels import PRECISIONS
from sageattention3.kernels.metrics import compare
from sageattention3.nodes.engine.layout import Layout
from sageattention3.nodes.engine.override import OPTION, make_override
from sageattention3.nodes.engine.plan import make_plan
from sageattention3.nodes.engine.session import Session
from torch.nn.attention import SDPBackend, sdpa_kernel

QUANTISED = [precision for precision in PRECISIONS if precision != "fp16"]
# Relative L1 of the FP4 precisions on gaussian tensors, beside the cosine that hides faults: what
# the kernels' own tests use, above the format's noise and below any wiring fault.
FP4_REL_L1 = {"fp4": 0.35, "int8_fp4": 0.25}


def tensors(b=1, hq=2, hk=None, nq=128, nk=None, d=64, spread=2.0, dtype=torch.float16, seed=0):
    """q [b, hq, nq, d], k and v [b, hk, nk, d]; N(0, spread) keys make a peaky softmax."""
    generator = torch.Generator().manual_seed(seed)
    hk, nk = hk or hq, nk or nq
    q, k, v = (
        torch.randn(b, h, n, d, generator=generator) for h, n in ((hq, nq), (hk, nk), (hk, nk))
    )
    return q.to(dtype), (k * spread).to(dtype), v.to(dtype)


def exact(q, k, v, mask=None):
    """torch's own attention in FP64, by the formula; ``mask`` as it takes one."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q.double(), k, v, attn_mask=mask)


def assert_accurate(out, reference, precision):
    """The bars of the cases: relative L1 for INT8, cosine (and relative L1) with FP4 in it."""
    errors = compare(out, reference)
    assert errors.finite, errors
    if precision == "int8":
        assert errors.rel_l1 < 0.05, errors
    else:
        assert errors.cosine > 0.94, errors
        assert errors.rel_l1 < FP4_REL_L1[precision], errors


def packed(x):
    """[B, H, N, D] -> (B, N, H*D), the layout of most of the host's models."""
    return x.transpose(1, 2).flatten(2)


@cache
def core_attention():
    """The host's attention through torch's SDPA, as its models call it (it honours overrides)."""
    host.import_comfy()
    from comfy.ldm.modules.attention import attention_pytorch

    return attention_pytorch


def overridable(attention):
    """``attention`` as one of the host's own attention functions: it honours overrides."""
    host.import_comfy()
    from comfy.ldm.modules.attention import wrap_attn

    return wrap_attn(attention)


class Patched:
    """The host's attention as the code of a patched model sees it; takes the host's arguments.

    The model is of unknown family: a call is cross-attention if q_len differs from kv_len.
    settings: of the patch; its defaults, but for emulation, where they are not given.
    """

    def __init__(self, host_attention=None, **settings):
        layout = Layout("toy", known=False)
        self.session = Session(make_plan(layout, emulation=True, **settings), layout)
        self.host_attention = host_attention or core_attention()
        self.session.begin_run()
        sampling = SimpleNamespace(percent_to_sigma=lambda percent: 1 - percent)
        options = {OPTION: make_override(self.session)}
        self.options = self.session.begin_forward(sampling, 0.5, options)

    @classmethod
    def everywhere(cls, precision, **settings):
        """All calls in ``precision``, short and cross ones too."""
        settings = {"min_tokens": 0, "cross_attention": "same", **settings}
        return cls(preset="custom", precision=precision, **settings)

    def __call__(self, *args, **kwargs):
        return self.host_attention(*args, transformer_options=self.options, **kwargs)

    @property
    def precisions(self):
        """Of the calls so far."""
        return [entry.precision for entry in self.session.ledger.current.counts.elements()]

    @property
    def reasons(self):
        """Why calls stayed with the host, each once."""
        entries = self.session.ledger.current.counts
        return {entry.reason for entry in entries if entry.backend == "host"}
