"""The pack beside the rest of a graph: other branches, other models, other hosts, torch.compile."""

import logging
import subprocess
import sys

import comfy.model_management
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sageattention3.demo import host, sampling, tiny
from sageattention3.demo.pack import ROOT
from sageattention3.demo.sampling import last_run, patched
from sageattention3.kernels import attention
from sageattention3.nodes import widgets
from sageattention3.nodes.engine.plan import PRESETS
from sageattention3.nodes.engine.summary import describe_run

from .calls import QUANTISED, Patched, core_attention, overridable, packed, tensors

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def flux():
    return tiny.model("flux")


@pytest.fixture(scope="module")
def sd15():
    return tiny.model("sd15")


# ------------------------------------------------------------- QA-23: masks, and nobody quantises
def test_a_patch_that_quantises_nothing_ends_its_run_with_a_warning(caplog):
    """QA-23: a model that always passes masks made the fast path silently inactive."""
    model = patched(tiny.model("hunyuan_video"), emulation=False)
    with caplog.at_level(logging.INFO, "sageattention3"):
        sampling.sample(model, "hunyuan_video", steps=1)
    [line] = [r for r in caplog.records if "attention calls" in r.getMessage()]
    assert line.levelno == logging.WARNING
    assert "no native int8 kernel" in line.getMessage()


def test_masked_calls_are_quantised_and_counted_as_such():
    """QA-23: the run says how many calls were quantised, masks or not."""
    call = Patched.everywhere("int8")
    q, k, v = map(packed, tensors(b=2))
    mask = torch.ones(2, 1, 1, 128, dtype=torch.bool)
    call(q, k, v, 2, mask=mask)
    call(q, k, v, 2)
    assert call.precisions == ["int8", "int8"]


# ------------------------------------------------------------------------ QA-24: no trace is left
WATCHED = """
import torch, torch.nn.functional as F
import comfy.ldm.modules.attention as A, comfy.ldm.flux.math as M, comfy.ldm.wan.model as W
def state():
    return [F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention,
            A.optimized_attention, A.optimized_attention_masked, M.optimized_attention,
            W.optimized_attention, A.wrap_attn]
"""


def test_importing_the_pack_replaces_nothing_in_torch_or_the_host():
    """QA-24: packs that replace torch's SDPA for the whole process act on every model."""
    program = f"""
import importlib.util, sys
sys.path.insert(0, {str(host.COMFY)!r})
sys.argv = ["comfy", "--cpu"]
import comfy.options; comfy.options.enable_args_parsing()
{WATCHED}
before = state()
spec = importlib.util.spec_from_file_location(
    "pack", {str(ROOT / "__init__.py")!r}, submodule_search_locations=[{str(ROOT)!r}])
sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["pack"])
print(all(a is b for a, b in zip(before, state())))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(
    "failure",
    [
        comfy.model_management.InterruptProcessingException(),
        torch.cuda.OutOfMemoryError("out of memory"),
    ],
    ids=["interrupt", "out of memory"],
)
def test_unpatched_runs_are_bit_equal_after_a_patched_run_that_broke_off(flux, sd15, failure):
    """QA-24: run A patched and broken off, then B bypassed, then C on another model."""
    watched: dict = {}
    exec(WATCHED, watched)
    before = watched["state"]()
    plain = sampling.sample(flux, "flux"), sampling.sample(sd15, "sd15")

    def break_off(step, *_):
        raise failure

    with pytest.raises(type(failure)):
        sampling.sample(patched(flux), "flux", callback=break_off)

    after = sampling.sample(flux, "flux"), sampling.sample(sd15, "sd15")
    assert all(torch.equal(a, b) for a, b in zip(plain, after, strict=True))
    assert all(a is b for a, b in zip(before, watched["state"](), strict=True))


# --------------------------------------------------------------------------- QA-25: two branches
def test_branches_of_one_model_keep_their_own_settings_and_counts(flux):
    """QA-25: patched, plain and otherwise patched branches, run in turns."""
    branches = {"int8": patched(flux), "plain": flux, "fp4": patched(flux, precision="fp4")}
    alone = {name: sampling.sample(model, "flux") for name, model in branches.items()}
    assert not torch.equal(alone["int8"], alone["plain"])
    assert not torch.equal(alone["int8"], alone["fp4"])
    for _ in range(2):
        for name, model in branches.items():
            assert torch.equal(sampling.sample(model, "flux"), alone[name])
    for name in ("int8", "fp4"):
        assert {entry.precision for entry in last_run(branches[name]).counts} == {name}
    assert "optimized_attention_override" not in str(flux.model_options)


# --------------------------------------------------------------------------- QA-27: other hosts
def test_an_argument_of_a_future_host_reaches_the_host_and_stops_no_kernel():
    """QA-27: a new keyword broke every run of wrappers with a fixed signature."""
    seen = []

    def host_attention(q, k, v, heads, **kwargs):
        seen.append(kwargs.get("future_flag"))
        return core_attention()(q, k, v, heads)

    q, k, v = map(packed, tensors())
    quantised = Patched.everywhere("int8", host_attention=overridable(host_attention))
    same = Patched.everywhere("int8")
    assert torch.equal(quantised(q, k, v, 2, future_flag=1), same(q, k, v, 2))
    assert seen == []
    left = Patched.everywhere("fp16", host_attention=overridable(host_attention))
    left(q, k, v, 2, future_flag=1)
    assert seen == [1]


def test_a_host_without_overrides_is_refused_at_the_node(flux, monkeypatch):
    """QA-27: an old core must say so before the run, not at its first step."""
    import comfy.ldm.modules.attention

    monkeypatch.delattr(comfy.ldm.modules.attention, "wrap_attn")
    with pytest.raises(RuntimeError, match=r"Update ComfyUI to version 0\.3\.60"):
        patched(flux)


# ----------------------------------------------------------------------------- QA-28: opting out
@pytest.mark.parametrize("preset", [*PRESETS, *QUANTISED])
def test_a_caller_that_opts_out_gets_the_hosts_own_attention(preset):
    """QA-28: ACE-Step, SAM3 and Wan's image attention turn to NaN in low precision."""
    settings = (
        {"preset": preset} if preset in PRESETS else {"preset": "custom", "precision": preset}
    )
    call = Patched(min_tokens=0, **settings)
    q, k, v = map(packed, tensors())
    out = call(q, k, v, 2, low_precision_attention=False)
    assert torch.equal(out, core_attention()(q, k, v, 2))
    assert call.precisions == ["fp16"]


# -------------------------------------------------------------------------- QA-29: other dtypes
@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float16, torch.float16),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32,) * 3,
        (torch.float64,) * 3,
    ],
)
def test_mixed_and_wide_dtypes_answer_in_the_dtype_of_the_queries(precision, dtypes):
    """QA-29: IP-Adapter mixes dtypes; 7e4 in FP32 must not pass through FP16 on its way."""
    call = Patched.everywhere(precision)
    q, k, v = (x.to(t) for x, t in zip(map(packed, tensors()), dtypes, strict=True))
    if v.dtype.itemsize > 2:
        v = v * 7e4
    out = call(q, k, v, 2)
    assert out.dtype == dtypes[0] or not out.isfinite().all()
    assert call.precisions == [precision]
    limit = torch.finfo(dtypes[0]).max
    expected = F.scaled_dot_product_attention(
        *(x.double().unflatten(-1, (2, -1)).transpose(1, 2) for x in (q, k, v))
    ).clamp(-limit, limit)
    error = (out.double() - packed(expected)).abs().sum() / expected.abs().sum()
    assert error < (0.05 if precision == "int8" else 0.35)


def test_fp8_inputs_are_left_to_the_host_with_the_reason():
    """QA-29: no kernel knows scales of a caller's own FP8 tensors."""
    seen = []
    call = Patched.everywhere(
        "int8", host_attention=overridable(lambda q, *a, **kw: seen.append(q) or q)
    )
    q, k, v = (packed(x).to(torch.float8_e4m3fn) for x in tensors())
    call(q, k, v, 2)
    assert seen[0] is q
    [entry] = call.session.ledger.current.counts
    assert "float8" in entry.reason


# ------------------------------------------------------------------ QA-30, QA-31: whose attention
def test_attention_outside_of_the_model_is_never_ours(flux):
    """QA-30: text encoders, VAEs and ControlNets call the host's attention without options."""
    q, k, v = map(packed, tensors())
    before = core_attention()(q, k, v, 2)
    model = patched(flux)
    sampling.sample(model, "flux", steps=1)
    calls = last_run(model).calls
    assert torch.equal(core_attention()(q, k, v, 2), before)
    assert last_run(model).calls == calls


def test_a_run_without_a_single_call_is_told_apart_from_a_fast_one():
    """QA-31: on models with their own attention the node did nothing and nobody said so."""
    call = Patched.everywhere("int8")
    assert describe_run(call.session.ledger.current) == (
        "0 attention calls seen: this model uses its own attention, which no patch can reach; "
        "it ran unchanged"
    )


# ----------------------------------------------------------------------------- QA-32: torch.compile
@pytest.mark.parametrize("precision", QUANTISED)
def test_six_compiled_blocks_are_one_graph_over_lengths_and_strides(precision):
    """QA-32: graph breaks, noise where eager is fine, recompiles at every length."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    weights = [torch.randn(64, 192, generator=torch.Generator().manual_seed(i)) for i in range(6)]

    def toy(x):
        for weight in weights:
            q, k, v = (x @ (weight / 8)).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
            x = x + attention(q, k, v, precision=precision).transpose(1, 2).flatten(2)
        return x

    compiled = torch.compile(toy, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (48, 80, 48):
        x = torch.randn(1, tokens, 64)
        assert torch.equal(compiled(x), toy(x))
    assert counter.frame_count == 1


def test_the_widgets_know_every_choice_that_a_plan_knows():
    """QA-27: a combo value of another version is refused with what there is."""
    assert "fastest" in widgets.check_choices(preset="fastest")
    assert widgets.check_choices(preset="balanced") is True
