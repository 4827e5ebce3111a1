"""Every attention call of a forward pass gets the id of its layer, in real host models."""

import functools

import pytest
import torch
from sageattention3.demo import sampling, tiny
from sageattention3.demo.families import FAMILIES
from sageattention3.nodes.engine.families import CROSS_ROLES
from sageattention3.nodes.engine.layers import STATE_KEY, LayerTracker
from sageattention3.nodes.engine.layout import describe_model

from .more_families import MORE
from .watching import Watch

pytestmark = pytest.mark.host


@pytest.fixture(autouse=True)
def _more_families(monkeypatch):
    for name, family in MORE.items():
        monkeypatch.setitem(FAMILIES, name, family)


@functools.cache
def tiny_model(family: str):
    return tiny.model(family)


@pytest.fixture(scope="module", autouse=True)
def _forget_models():
    yield
    tiny_model.cache_clear()  # not at exit, when the host's modules are half gone


def watch(family: str, **options) -> Watch:
    watched = Watch(tiny_model(family))
    sampling.forward(watched.model, family, **options)
    return watched


def replace(kind: str, functions: dict) -> dict:
    """transformer_options with another node's replace functions in them."""
    return {"patches_replace": {kind: functions}}


def skip(args, extra):
    """What skip-layer guidance puts in the place of a block."""
    return args


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_a_forward_pass_calls_the_layers_of_the_layout_and_no_others(family):
    watched = watch(family)
    assert watched.layout.known
    expected = watched.layout.layer_ids
    if family == "omnigen2":  # no reference image in the input
        expected = tuple(layer for layer in expected if "ref_image" not in layer)
    assert tuple(dict.fromkeys(watched.ids)) == expected
    assert len(set(watched.layout.layer_ids)) == len(watched.layout.layer_ids)


@pytest.mark.parametrize(
    ("family", "ids"),
    [
        ("flux", "double.0 double.1 single.0 single.1 single.2"),
        ("hunyuan_video", "refiner.0 refiner.1 double.0 double.1 single.0 single.1"),
        ("wan_t2v", "block.0.self block.0.cross block.1.self block.1.cross"),
        (
            "wan_i2v",
            "block.0.self block.0.image block.0.text block.1.self block.1.image block.1.text",
        ),
        ("ltxv", "block.0.self block.0.cross block.1.self block.1.cross"),
        ("qwen_image", "double.0 double.1"),
        ("mochi", "block.0 block.1"),
        (
            "z_image",
            "context_refiner.0 context_refiner.1 noise_refiner.0 noise_refiner.1 block.0 block.1",
        ),
        ("hidream", "double.0 double.1 single.0 single.1"),
        ("ace_step", "block.0.cross block.1.cross"),
    ],
)
def test_ids_read_as_documented(family, ids):
    assert watch(family).ids == ids.split()


def test_sd3_names_its_second_attention_where_a_block_has_one():
    ids = watch("sd3").ids
    blocks = [id.rsplit(".", 1)[0] for id in ids]
    assert set(ids) >= {"block.0.joint", "block.0.self"}
    assert blocks == sorted(blocks)


def test_vace_blocks_follow_their_main_block_once_per_control_video():
    ids = watch("wan_vace").ids
    side = ["vace.0.self", "vace.0.cross"] * 2  # the tiny input has two control videos
    assert ids[:6] == ["block.0.self", "block.0.cross", *side]
    assert ids[-2:] == ["block.3.self", "block.3.cross"]


def test_unet_ids_carry_block_transformer_and_role():
    ids = watch("sd15").ids
    assert ids[:2] == ["input.1.0.self", "input.1.0.cross"]
    assert all(id.endswith((".self", ".cross")) for id in ids)


@pytest.mark.parametrize("family", ["wan_t2v", "wan_vace", "ltxv", "sd15", "cosmos", "ace_step"])
def test_roles_agree_with_the_lengths_of_the_call(family):
    watched = watch(family)
    for call, (q_len, kv_len) in zip(watched.calls, watched.lengths, strict=True):
        assert (call.role in CROSS_ROLES) == (q_len != kv_len), call


def test_a_model_without_its_optional_input_makes_fewer_calls():
    model = tiny_model("wan_humo")
    x, conditions = tiny.inputs("wan_humo")
    for given in (conditions, {**conditions, "audio_embed": None}):
        watched = Watch(model)
        options = watched.model.model_options["transformer_options"]
        options["wrappers"] = watched.model.wrappers
        with torch.inference_mode():
            model.model.apply_model(x, torch.tensor([0.5]), transformer_options=options, **given)
        roles = (
            ["self", "cross", "audio"] if given["audio_embed"] is not None else ["self", "cross"]
        )
        assert watched.ids == [f"block.{i}.{role}" for i in range(2) for role in roles]


@pytest.mark.parametrize("family", ["sd3", "wan_t2v", "wan_vace", "flux", "ltxv", "mochi"])
def test_skipped_blocks_do_not_shift_the_names_of_others(family):
    everything = watch(family)
    skipped = watch(family, **replace("dit", {("double_block", 1): skip}))
    one = everything.layout.stacks[everything.layout.blocks[0].stack][1]
    gone = {layer.id for layer in one.layers}
    assert gone
    assert skipped.ids == [id for id in everything.ids if id not in gone]


def test_a_replace_function_of_another_node_is_called_and_may_run_the_block():
    seen = []

    def cached(args, extra):
        seen.append(args["transformer_options"][STATE_KEY])
        return extra["original_block"](args)

    plain = watch("flux")
    watched = watch("flux", **replace("dit", {("single_block", 2): cached}))
    assert [layer.id for state in seen for layer in state.layers] == ["single.2"]
    assert watched.ids == plain.ids


def test_a_forward_pass_leaves_no_trace_in_the_model_or_the_callers_options():
    watched = Watch(tiny_model("flux"))
    options = {"patches_replace": {"dit": {("double_block", 0): skip}, "attn1": {}}}
    sampling.forward(watched.model, "flux", **options)
    assert options == {"patches_replace": {"dit": {("double_block", 0): skip}, "attn1": {}}}
    assert STATE_KEY not in watched.model.model_options["transformer_options"]
    assert "patches_replace" not in watched.model.model_options["transformer_options"]


@pytest.mark.parametrize("where", [("middle", 0), ("middle", 0, 0)])
@pytest.mark.parametrize(("name", "role"), [("attn1", "self"), ("attn2", "cross")])
def test_unet_attention_that_another_node_computes_does_not_shift_names(where, name, role):
    def computed_elsewhere(q, k, v, extra_options):
        return q

    everything = watch("sd15")
    watched = watch("sd15", **replace(name, {where: computed_elsewhere}))
    gone = f"middle.0.0.{role}"
    assert gone in everything.ids
    assert watched.ids == [id for id in everything.ids if id != gone]


def test_perturbed_attention_guidance_keeps_names_in_its_extra_pass():
    from comfy_extras.nodes_pag import PerturbedAttentionGuidance

    watched = Watch(tiny_model("sd15"))
    (model,) = PerturbedAttentionGuidance.execute(watched.model, scale=3.0).args
    sampling.sample(model, "sd15", steps=1)
    usual = list(watched.layout.layer_ids)
    assert watched.ids == usual + [id for id in usual if id != "middle.0.0.self"]


def test_hypertile_keeps_names_though_it_cuts_the_image():
    from comfy_extras.nodes_hypertile import HyperTile

    watched = Watch(tiny_model("sd15"))
    (model,) = HyperTile.execute(
        watched.model, tile_size=64, swap_size=2, max_depth=1, scale_depth=False
    )
    sampling.sample(model, "sd15", steps=1, latent=(4, 32, 32))
    assert tuple(watched.ids) == watched.layout.layer_ids
    plain = Watch(tiny_model("sd15"))
    sampling.sample(plain.model, "sd15", steps=1, latent=(4, 32, 32))
    assert watched.lengths != plain.lengths  # it did cut


@pytest.mark.parametrize(
    ("family", "cfg"), [("lumina2", 1.0), ("lumina2", 4.0), ("hunyuan_video", 1.0), ("ltxv", 4.0)]
)
def test_every_pass_of_a_sampler_starts_anew(family, cfg):
    watched = Watch(tiny_model(family))
    sampling.sample(watched.model, family, steps=2, sampler="heun", cfg=cfg)
    passes, rest = divmod(len(watched.ids), len(watched.layout.layer_ids))
    assert rest == 0
    assert passes >= 3  # heun calls the model twice in the first step
    assert watched.ids == list(watched.layout.layer_ids) * passes


def test_a_pass_that_was_interrupted_does_not_shift_the_next():
    watched = Watch(tiny_model("lumina2"))
    override = watched.model.model_options["transformer_options"]["optimized_attention_override"]

    def interrupted(*args, **kwargs):
        if len(watched.calls) == 3:
            raise InterruptedError
        return override(*args, **kwargs)

    with pytest.raises(InterruptedError):
        sampling.forward(watched.model, "lumina2", optimized_attention_override=interrupted)
    watched.calls.clear()
    sampling.forward(watched.model, "lumina2")
    assert tuple(watched.ids) == watched.layout.layer_ids


def test_a_subclass_of_a_host_model_is_of_its_family():
    model = tiny.model("flux").model.diffusion_model
    model.__class__ = type("Custom", (type(model),), {})
    assert describe_model(model).family == "flux"


def test_a_compiled_model_is_described_as_what_it_compiles():
    model = tiny_model("flux").model.diffusion_model
    assert describe_model(torch.compile(model)) == describe_model(model)


def test_stable_audio_names_its_calls():
    # Its host model needs weights of a text encoder too: the network alone does here.
    import comfy.ops
    from comfy.ldm.audio.dit import AudioDiffusionTransformer

    network = AudioDiffusionTransformer(
        io_channels=8,
        embed_dim=128,
        depth=2,
        num_heads=2,
        cond_token_dim=128,
        operations=comfy.ops.manual_cast,
    )
    tracker, ids = LayerTracker(describe_model(network)), []

    def override(func, q, k, v, *args, **kwargs):
        ids.append(tracker.identify(kwargs["transformer_options"], q.shape[2], k.shape[2]).id)
        return func(q, k, v, *args, **kwargs)

    options = tracker.begin_forward({"optimized_attention_override": override})
    with torch.inference_mode():
        network(
            torch.zeros(1, 8, 32),
            torch.tensor([0.5]),
            context=torch.zeros(1, 6, 128),
            transformer_options=options,
        )
    assert ids == ["block.0.self", "block.0.cross", "block.1.self", "block.1.cross"]


class _Novel(torch.nn.Module):
    """An architecture that has no adapter."""

    def forward(self, x, transformer_options):
        from comfy.ldm.modules.attention import optimized_attention

        for keys in (x, x, x[:, :3]):
            x = optimized_attention(x, keys, keys, 2, transformer_options=transformer_options)
        return x


def test_layers_of_an_unknown_architecture_are_numbered_by_call():
    model, calls = _Novel(), []
    layout = describe_model(model)
    tracker = LayerTracker(layout)

    def override(func, q, k, v, *args, **kwargs):
        call = tracker.identify(kwargs["transformer_options"], q.shape[1], k.shape[1])
        calls.append((call.id, call.role))
        return func(q, k, v, *args, **kwargs)

    for _ in range(2):
        options = tracker.begin_forward({"optimized_attention_override": override})
        model(torch.zeros(1, 8, 16), options)
    assert not layout.known
    assert layout.family == "unknown (_Novel)"
    assert calls == [("call.0", "self"), ("call.1", "self"), ("call.2", "cross")] * 2
