"""Beside other nodes: foreign overrides, replaced or skipped attention, models not ours."""

from functools import cache

import comfy.cldm.cldm
import comfy.controlnet
import comfy.ops
import pytest
import torch
from comfy.clip_model import CLIPTextModel
from comfy.ldm.modules.diffusionmodules.model import AttnBlock
from sageattention3.demo import sampling, tiny
from sageattention3.demo.families import FAMILIES
from sageattention3.demo.sampling import last_run, patched
from sageattention3.nodes.engine.override import OPTION, find_session
from sageattention3.nodes.engine.summary import describe_runs

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def tiny_model():
    """The tiny model of a family by name, built once; no test changes it."""
    return cache(tiny.model)


def report(model):
    session = find_session(model)
    return describe_runs(session.ledger.take_unreported().runs, session.expected_layers)


def with_override(model, override):
    """As nodes of other packs do it: clone, and write the one slot."""
    model = model.clone()
    model.model_options["transformer_options"][OPTION] = override
    return model


# --- other nodes' overrides ----------------------------------------------------------------------


def doubled(func, *args, **kwargs):
    return 2 * func(*args, **kwargs)


def test_an_override_before_ours_serves_only_the_calls_left_to_the_host(tiny_model):
    flux = tiny_model("flux")
    foreign = with_override(flux, doubled)
    all_foreign = patched(foreign, precision="fp16")
    assert torch.equal(sampling.forward(all_foreign, "flux"), sampling.forward(foreign, "flux"))
    none_foreign = patched(foreign)
    assert torch.equal(
        sampling.forward(none_foreign, "flux"), sampling.forward(patched(flux), "flux")
    )


def test_a_second_patch_keeps_the_foreign_override_below_the_first(tiny_model):
    foreign = with_override(tiny_model("flux"), doubled)
    twice = patched(patched(foreign), precision="fp16")
    assert torch.equal(sampling.forward(twice, "flux"), sampling.forward(foreign, "flux"))


def test_an_override_after_ours_that_calls_it_leaves_us_at_work(tiny_model):
    model = patched(tiny_model("flux"))
    ours = model.model_options["transformer_options"][OPTION]

    def chaining(func, *args, **kwargs):
        return ours(func, *args, **kwargs)

    alone = sampling.forward(model, "flux")
    assert torch.equal(sampling.forward(with_override(model, chaining), "flux"), alone)
    assert "another node's attention override was on top" in report(model)


def test_an_override_after_ours_that_replaces_it_is_named_in_the_report(tiny_model):
    def sage_from_elsewhere(func, *args, **kwargs):
        return func(*args, **kwargs)

    model = with_override(patched(tiny_model("flux")), sage_from_elsewhere)
    sampling.sample(model, "flux", steps=1)
    text = report(model)
    assert text.startswith("0 attention calls seen: another node replaced the attention override")
    assert "sage_from_elsewhere" in text


def test_our_old_patch_below_a_foreign_chain_sleeps_once_a_new_patch_is_on_top(tiny_model):
    old = patched(tiny_model("flux"), precision="fp4")
    ours = old.model_options["transformer_options"][OPTION]
    chained = with_override(old, lambda func, *a, **kw: ours(func, *a, **kw))
    new = patched(chained, precision="fp16")
    reference = sampling.forward(tiny_model("flux"), "flux")
    assert torch.equal(sampling.forward(new, "flux"), reference)


# --- nodes that replace or skip attention --------------------------------------------------------


def test_perturbed_attention_guidance_runs_beside_us_and_the_ledger_fits(tiny_model):
    from comfy_extras.nodes_pag import PerturbedAttentionGuidance

    model = patched(tiny_model("sd15"))
    guided = PerturbedAttentionGuidance.execute(model, 3.0).args[0]
    sampling.sample(guided, "sd15", steps=1, cfg=4.0)
    run = last_run(model)
    calls = dict.fromkeys(run.layers(), 0)
    for entry, number in run.counts.items():
        calls[entry.layer] += number
    # One pass for both conditionings, one perturbed pass whose middle self-attention is replaced.
    assert run.forwards == 2
    assert calls.pop("middle.0.0.self") == 1
    assert set(calls.values()) == {2}


def test_skip_layer_guidance_skips_our_layers_too(tiny_model):
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    model = patched(tiny_model("flux"), fp16_layers="double.1")
    skipping = SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, "0", "1").args[0]
    sampling.sample(skipping, "flux", steps=1, cfg=4.0)
    run = last_run(model)
    calls = dict.fromkeys(run.layers(), 0)
    for entry, number in run.counts.items():
        calls[entry.layer] += number
        assert entry.precision == ("fp16" if entry.layer == "double.1" else "int8")
    assert calls["double.0"] == calls["single.1"] < calls["double.1"] == calls["single.0"]


def test_hypertile_changes_shapes_and_keeps_layers(tiny_model):
    from comfy_extras.nodes_hypertile import HyperTile

    model = patched(tiny_model("sd15"))
    (tiled,) = HyperTile.execute(model, 32, 2, 0, False)
    torch.manual_seed(0)  # the node tiles at random
    out = sampling.sample(tiled, "sd15", steps=1, latent=(4, 32, 32))
    assert out.isfinite().all()
    assert set(last_run(model).layers()) == set(find_session(model).expected_layers)
    (reference,) = HyperTile.execute(tiny_model("sd15"), 32, 2, 0, False)
    torch.manual_seed(0)
    expected = sampling.sample(reference, "sd15", steps=1, latent=(4, 32, 32))
    assert (out - expected).abs().sum() / expected.abs().sum() < 0.02


def test_a_dit_block_replaced_by_another_node_is_wrapped_and_kept(tiny_model):
    model = patched(tiny_model("flux"), fp16_layers="double.1").clone()
    seen = []

    def other_nodes_replacement(args, extra):
        seen.append(args["transformer_options"]["block_index"])
        return extra["original_block"](args)

    model.set_model_patch_replace(other_nodes_replacement, "dit", "double_block", 1)
    sampling.forward(model, "flux")
    assert seen == [1]
    kept = {entry.layer for entry in last_run(model).counts if entry.precision == "fp16"}
    assert kept == {"double.1"}


def test_a_lora_after_the_patch_changes_the_weights_and_not_the_attention(tiny_model):
    model = patched(tiny_model("flux"))
    weight = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
    shape = model.model.state_dict()[weight].shape
    changed = model.clone()
    changed.add_patches({weight: ("diff", (torch.full(shape, 0.02),))})
    plain = sampling.sample(model, "flux", steps=1)
    with_lora = sampling.sample(changed, "flux", steps=1)
    assert not torch.equal(plain, with_lora)
    first, second = find_session(model).ledger.take_unreported().runs
    assert first.counts == second.counts
    assert torch.equal(sampling.sample(model, "flux", steps=1), plain)


# --- what is not ours ----------------------------------------------------------------------------


def test_a_controlnet_keeps_its_own_attention(tiny_model):
    """Its weights are random; the patched model sees no call of it, and its output is the same."""
    torch.manual_seed(0)
    config = {**tiny_model("sd15").model.model_config.unet_config, "num_heads": 8}
    for unused in ("out_channels", "disable_unet_model_creation", "image_model", "dtype"):
        config.pop(unused, None)
    control_model = comfy.cldm.cldm.ControlNet(
        **{**config, "hint_channels": 3, "device": None, "dtype": torch.float32},
        operations=comfy.ops.disable_weight_init,
    )
    for parameter in control_model.parameters():
        torch.nn.init.normal_(parameter.requires_grad_(False), std=0.05)
    control = comfy.controlnet.ControlNet(control_model, load_device=torch.device("cpu"))
    hint = torch.rand(1, 3, 128, 128)

    def controlled(model):
        hints, calls = [], []
        net = control.copy().set_cond_hint(hint, 1.0, (0.0, 1.0))
        forward = control_model.forward

        def watched(*args, **kwargs):
            calls.append(kwargs)
            hints.append(forward(*args, **kwargs))
            return hints[-1]

        control_model.forward = watched
        try:
            positive = [[cond, {**extra, "control": net, "control_apply_to_uncond": True}]
                        for cond, extra in tiny.conditioning("sd15")]  # fmt: skip
            sampling.sample(model, "sd15", steps=1, positive=positive)
        finally:
            control_model.forward = forward
        return hints[0], calls

    model = patched(tiny_model("sd15"))
    (ours, calls), (expected, _) = controlled(model), controlled(tiny_model("sd15"))
    assert calls
    assert all(
        torch.equal(a, b) for key in expected for a, b in zip(ours[key], expected[key], strict=True)
    )
    assert last_run(model).calls == len(find_session(model).expected_layers)


def test_a_text_encoder_and_a_vae_that_run_beside_a_patched_model_are_not_touched(tiny_model):
    torch.manual_seed(0)
    width = 64
    config = {
        "num_hidden_layers": 1,
        "hidden_size": width,
        "num_attention_heads": 4,
        "intermediate_size": width,
        "hidden_act": "quick_gelu",
        "eos_token_id": 1,
        "max_position_embeddings": 77,
    }
    operations = comfy.ops.disable_weight_init
    encoder = CLIPTextModel(config, torch.float32, "cpu", operations)
    vae_attention = AttnBlock(width)
    for parameter in [*encoder.parameters(), *vae_attention.parameters()]:
        torch.nn.init.normal_(parameter.requires_grad_(False), std=0.05)
    tokens, latent = torch.arange(77)[None], torch.randn(1, width, 8, 8)
    results = []

    def run_both(*_):
        results.append((encoder(tokens)[0], vae_attention(latent)))

    run_both()
    model = patched(tiny_model("flux"))
    sampling.sample(model, "flux", steps=2, callback=run_both)
    expected, *during = results
    assert len(during) == 2
    for result in during:
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert last_run(model).calls == 2 * len(find_session(model).expected_layers)


def test_a_model_that_never_calls_the_hosts_attention_is_told_so(tiny_model, monkeypatch):
    """As in packs that bring their own blocks."""
    import comfy.ldm.flux.math

    def own_attention(q, k, v, heads, **kwargs):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2)

    monkeypatch.setattr(comfy.ldm.flux.math, "optimized_attention", own_attention)
    model = patched(tiny_model("flux"))
    sampling.sample(model, "flux", steps=1)
    assert report(model).startswith("0 attention calls seen: this model uses its own attention")


def test_every_call_of_a_model_that_always_passes_masks_is_counted(tiny_model):
    model = patched(tiny_model("hunyuan_video"))
    sampling.sample(model, "hunyuan_video", steps=1)
    assert FAMILIES["hunyuan_video"].text.masked
    assert last_run(model).calls == len(find_session(model).expected_layers)
