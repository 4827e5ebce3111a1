"""Tiny models of rarer families than those of the demo: only to see which layers they call."""

from sageattention3.demo import widths
from sageattention3.demo.families import IMAGE, VIDEO, Family, Text

MORE = {
    family.name: family
    for family in (
        Family(
            "wan_humo",
            "WAN21_HuMo",
            {**widths.WAN, "model_type": "humo", "in_dim": 36},
            VIDEO,
            Text(4096),
            conditions={"c_concat": (20, 3, 16, 16), "audio_embed": (3, 8, 5, 1280)},
        ),
        Family(
            "hunyuan3d",
            "Hunyuan3Dv2",
            {
                "in_channels": 16,
                "context_in_dim": 64,
                "hidden_size": 128,
                "num_heads": 2,
                "depth": 2,
                "depth_single_blocks": 2,
            },
            (16, 32),
            Text(64),
        ),
        Family(
            "ace_step",
            "ACEStep",
            {
                "num_layers": 2,
                "num_attention_heads": 2,
                "attention_head_dim": 64,
                "inner_dim": 128,
                "text_embedding_dim": 64,
            },
            (8, 16, 8),
            Text(64),
            conditions={
                "speaker_embeds": (512,),
                "lyric_token_idx": [[1, 2, 3, 4]],
                "lyric_mask": [[1.0] * 4],
            },
        ),
        Family(
            "cascade_c",
            "Stable_Cascade_C",
            {
                "c_cond": 64,
                "c_hidden": [64, 64],
                "nhead": [2, 2],
                "blocks": [[1, 2], [2, 1]],
                "block_repeat": [[1, 1], [1, 1]],
                "c_clip_text": 64,
                "c_clip_text_pooled": 64,
                "c_clip_img": 32,
            },
            (16, 8, 8),
            Text(64),
            conditions={"clip_text": (8, 64), "clip_text_pooled": (1, 64), "clip_img": (1, 32)},
        ),
        Family(
            "cascade_b",
            "Stable_Cascade_B",
            {
                "c_cond": 64,
                "c_hidden": [32, 32, 64, 64],
                "nhead": [-1, -1, 2, 2],
                "blocks": [[1, 1, 2, 1], [1, 2, 1, 1]],
                "c_clip": 64,
            },
            (4, 32, 32),
            Text(64),
            conditions={"effnet": (16, 8, 8), "clip": (1, 64)},
        ),
        Family(
            "omnigen2_reference",
            "Omnigen2",
            widths.OMNIGEN2,
            IMAGE,
            Text(64),
            conditions={"num_tokens": widths.TEXT_TOKENS, "ref_latents": (1, 16, 16, 16)},
        ),
    )
}
