"""The families that the host passes to an attention override, one row each.

Read from ComfyUI 0.3.75 and checked up to 0.19. Left out because their attention calls carry no
transformer_options, so that no override ever sees them: PixArt, Hunyuan DiT, Hunyuan3D 2.1. A model
that is in no row works too; its layers are then called ``call.0``, ``call.1`` ... in order.
"""

from .blocks import JOINT, SELF, SELF_CROSS, Family, Stack, in_order
from .cascade import cascade_blocks
from .unet import unet_blocks
from .wan import vace_blocks, wan_block


def _sd3_roles(block: object) -> tuple[str, ...]:
    return ("joint", "self") if block.x_block.x_block_self_attn else JOINT


def _cosmos_roles(block: object) -> tuple[str, ...]:
    spelled = {"fa": "self", "full_attn": "self", "ca": "cross", "cross_attn": "cross"}
    return tuple(spelled[part.block_type] for part in block.blocks if part.block_type in spelled)


def _audio_roles(block: object) -> tuple[str, ...]:
    return SELF_CROSS if block.cross_attend else SELF


_DOUBLE_SINGLE = in_order(
    Stack("double", "double_blocks", hook="double_block"),
    Stack("single", "single_blocks", hook="single_block"),
)

FAMILIES = (
    Family("flux", ("flux.model.Flux",), _DOUBLE_SINGLE),
    Family("chroma", ("chroma.model.Chroma",), _DOUBLE_SINGLE),
    Family("hunyuan3d", ("hunyuan3d.model.Hunyuan3Dv2",), _DOUBLE_SINGLE),
    Family(
        "hunyuan_video",
        ("hunyuan_video.model.HunyuanVideo",),
        in_order(
            Stack("refiner", "txt_in.individual_token_refiner.blocks", SELF, main=False),
            Stack("double", "double_blocks", hook="double_block"),
            Stack("single", "single_blocks", hook="single_block"),
        ),
    ),
    Family(
        "qwen_image",
        ("qwen_image.model.QwenImageTransformer2DModel",),
        in_order(Stack("double", "transformer_blocks", hook="double_block")),
    ),
    # A row for subclasses of WanModel must stand before WanModel's own.
    Family("wan_vace", ("wan.model.VaceWanModel",), vace_blocks),
    Family("wan", ("wan.model.WanModel",), in_order(wan_block)),
    Family(
        "ltxv",
        ("lightricks.model.LTXVModel",),
        in_order(Stack("block", "transformer_blocks", SELF_CROSS, hook="double_block")),
    ),
    Family(
        "sd3",
        ("modules.diffusionmodules.mmdit.MMDiT",),
        in_order(
            Stack("block", "joint_blocks", _sd3_roles, hook="double_block", hook_checkpoints=True)
        ),
    ),
    Family(
        "aura_flow",
        ("aura.mmdit.MMDiT",),
        in_order(
            Stack("double", "double_layers", hook="double_block"),
            Stack("single", "single_layers", hook="single_block"),
        ),
    ),
    Family(
        "mochi",
        ("genmo.joint_model.asymm_models_joint.AsymmDiTJoint",),
        in_order(Stack("block", "blocks", hook="double_block")),
    ),
    # Lumina 2 and Z-Image. Newer hosts set block_type "double" in the main layers.
    Family(
        "lumina2",
        ("lumina.model.NextDiT",),
        in_order(
            Stack("context_refiner", "context_refiner", SELF, main=False),
            Stack("noise_refiner", "noise_refiner", SELF, main=False),
            Stack("block", "layers", key="double"),
        ),
    ),
    Family(
        "omnigen2",
        ("omnigen.omnigen2.OmniGen2Transformer2DModel",),
        in_order(
            Stack("context_refiner", "context_refiner", SELF, main=False),
            Stack("noise_refiner", "noise_refiner", SELF, main=False),
            Stack(
                "ref_image_refiner",
                "ref_image_refiner",
                SELF,
                main=False,
                optional=(("self", "ref_latents"),),
            ),
            Stack("block", "layers"),
        ),
    ),
    Family(
        "hidream",
        ("hidream.model.HiDreamImageTransformer2DModel",),
        in_order(
            Stack("double", "double_stream_blocks"),
            Stack("single", "single_stream_blocks"),
        ),
    ),
    Family(
        "cosmos", ("cosmos.model.GeneralDIT",), in_order(Stack("block", "blocks", _cosmos_roles))
    ),
    Family(
        "cosmos_predict2",
        ("cosmos.predict2.MiniTrainDIT",),
        in_order(Stack("block", "blocks", SELF_CROSS)),
    ),
    # ACE-Step's self-attention is linear attention of its own: only the other one is a call.
    Family(
        "ace_step",
        ("ace.model.ACEStepTransformer2DModel",),
        in_order(Stack("block", "transformer_blocks", ("cross",))),
    ),
    Family(
        "stable_audio",
        ("audio.dit.AudioDiffusionTransformer",),
        in_order(Stack("block", "transformer.layers", _audio_roles, hook="double_block")),
    ),
    Family("stable_cascade", ("cascade.stage_b.StageB", "cascade.stage_c.StageC"), cascade_blocks),
    Family("unet", ("modules.diffusionmodules.openaimodel.UNetModel",), unet_blocks),
)
