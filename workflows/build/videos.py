"""The video workflows: one function each, its docstring being the title."""

from .parts import CLIP_L, HUB, HUNYUAN, T5, WAN, model, patch, prompt, report, save_video
from .sheet import GREEN, PURPLE, Node, Output, Sheet

WAN_VAE = model("vae", "wan_2.1_vae.safetensors", f"{WAN}/vae")
WAN_TEXT = model("text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors", f"{WAN}/text_encoders")
WAN_NEGATIVE = (
    "overexposed, static, blurred details, subtitles, painting, still picture, worst quality, low "
    "quality, JPEG artefacts, extra fingers, deformed, cluttered background"
)


def hunyuan_video(sheet: Sheet) -> None:
    """HunyuanVideo, text to video"""
    sheet.column(330)
    with sheet.group("Models"):
        unet = sheet.add(
            "UNETLoader",
            unet_name=model(
                "diffusion_models",
                "hunyuan_video_t2v_720p_bf16.safetensors",
                f"{HUNYUAN}/diffusion_models",
            ),
        )
        clip = sheet.add(
            "DualCLIPLoader",
            clip_name1=CLIP_L,
            clip_name2=model(
                "text_encoders",
                "llava_llama3_fp8_scaled.safetensors",
                f"{HUNYUAN}/text_encoders",
            ),
            type="hunyuan_video",
        )
        vae = sheet.add(
            "VAELoader",
            vae_name=model("vae", "hunyuan_video_vae_bf16.safetensors", f"{HUNYUAN}/vae"),
        )
    with sheet.group("Size", GREEN):
        latent = sheet.add("EmptyHunyuanLatentVideo", width=848, height=480, length=73)
    sheet.column(360)
    with sheet.group("Prompt", GREEN):
        text = prompt(
            sheet,
            clip["CLIP"],
            "A red fox trots along a snowy ridge at sunrise, breath visible in the cold air, the "
            "camera follows from the side, shallow depth of field",
        )
        positive = sheet.add("FluxGuidance", conditioning=text["CONDITIONING"], guidance=6.0)
    patched = patch(
        sheet,
        unet["MODEL"],
        "balanced",
        "Video spends most of its time in attention, and more so with every extra frame: start "
        "with **balanced** (INT8 in every block). If fine motion flickers, keep the first steps in "
        "FP16 with preset **custom** and *start_percent* 0.1.",
    )
    sheet.column(315)
    with sheet.group("Sampling"):
        shifted = sheet.add("ModelSamplingSD3", model=patched["MODEL"], shift=7.0)
        guider = sheet.add(
            "BasicGuider", model=shifted["MODEL"], conditioning=positive["CONDITIONING"]
        )
        sigmas = sheet.add(
            "BasicScheduler", model=shifted["MODEL"], scheduler="simple", steps=20, denoise=1.0
        )
        noise = sheet.add("RandomNoise", noise_seed=42)
        sampler = sheet.add("KSamplerSelect", sampler_name="euler")
        sampled = sheet.add(
            "SamplerCustomAdvanced",
            noise=noise["NOISE"],
            guider=guider["GUIDER"],
            sampler=sampler["SAMPLER"],
            sigmas=sigmas["SIGMAS"],
            latent_image=latent["LATENT"],
        )
    seen = report(sheet, sampled["output"], patched)
    sheet.column(400)
    with sheet.group("Video", PURPLE):
        frames = sheet.add(
            "VAEDecodeTiled",
            samples=seen["samples"],
            vae=vae["VAE"],
            tile_size=256,
            overlap=64,
            temporal_size=64,
            temporal_overlap=8,
        )
        save_video(sheet, frames["IMAGE"], 24, "hunyuan_sageattention3")


def wan_sampling(
    sheet: Sheet, patched: Node, positive: Output, negative: Output, latent: Output, vae: Output
) -> None:
    """What both Wan graphs do after the Patch."""
    sheet.column(315)
    with sheet.group("Sampling"):
        shifted = sheet.add("ModelSamplingSD3", model=patched["MODEL"], shift=8.0)
        sampled = sheet.add(
            "KSampler",
            model=shifted["MODEL"],
            positive=positive,
            negative=negative,
            latent_image=latent,
            seed=42,
            steps=30,
            cfg=6.0,
            sampler_name="uni_pc",
            scheduler="simple",
        )
    seen = report(sheet, sampled["LATENT"], patched)
    sheet.column(400)
    with sheet.group("Video", PURPLE):
        frames = sheet.add("VAEDecode", samples=seen["samples"], vae=vae)
        save_video(sheet, frames["IMAGE"], 16, "wan_sageattention3")


def wan2_1_t2v(sheet: Sheet) -> None:
    """Wan 2.1, text to video"""
    sheet.column(330)
    with sheet.group("Models"):
        unet = sheet.add(
            "UNETLoader",
            unet_name=model(
                "diffusion_models",
                "wan2.1_t2v_1.3B_fp16.safetensors",
                f"{WAN}/diffusion_models",
            ),
        )
        clip = sheet.add("CLIPLoader", clip_name=WAN_TEXT, type="wan")
        vae = sheet.add("VAELoader", vae_name=WAN_VAE)
    with sheet.group("Size", GREEN):
        latent = sheet.add("EmptyHunyuanLatentVideo", width=832, height=480, length=81)
    sheet.column(360)
    with sheet.group("Prompt", GREEN):
        positive = prompt(
            sheet,
            clip["CLIP"],
            "A paper boat drifts down a rain-filled gutter past autumn leaves, low camera close to "
            "the water, soft overcast light",
        )
        negative = prompt(sheet, clip["CLIP"], WAN_NEGATIVE, "Negative prompt")
    patched = patch(
        sheet,
        unet["MODEL"],
        "balanced",
        "Self-attention over all frames is the long part and runs in INT8; text cross-attention is "
        "short and stays in FP16 (*cross_attention*). Name single calls as `block.5.self` or "
        "`block.5.cross` in *fp16_layers*.",
    )
    wan_sampling(
        sheet,
        patched,
        positive["CONDITIONING"],
        negative["CONDITIONING"],
        latent["LATENT"],
        vae["VAE"],
    )


def wan2_1_i2v(sheet: Sheet) -> None:
    """Wan 2.1, image to video"""
    sheet.column(330)
    with sheet.group("Models"):
        unet = sheet.add(
            "UNETLoader",
            unet_name=model(
                "diffusion_models",
                "wan2.1_i2v_480p_14B_fp16.safetensors",
                f"{WAN}/diffusion_models",
            ),
        )
        clip = sheet.add("CLIPLoader", clip_name=WAN_TEXT, type="wan")
        vae = sheet.add("VAELoader", vae_name=WAN_VAE)
        vision = sheet.add(
            "CLIPVisionLoader",
            clip_name=model("clip_vision", "clip_vision_h.safetensors", f"{WAN}/clip_vision"),
        )
    with sheet.group("First frame", GREEN):
        image = sheet.add("LoadImage", image="example.png", min_height=300)
    sheet.column(360)
    with sheet.group("Prompt", GREEN):
        positive = prompt(
            sheet,
            clip["CLIP"],
            "She turns her head and smiles, hair moving in a light breeze, the camera slowly moves "
            "closer",
        )
        negative = prompt(sheet, clip["CLIP"], WAN_NEGATIVE, "Negative prompt")
        seen = sheet.add(
            "CLIPVisionEncode",
            clip_vision=vision["CLIP_VISION"],
            image=image["IMAGE"],
            crop="none",
        )
        video = sheet.add(
            "WanImageToVideo",
            positive=positive["CONDITIONING"],
            negative=negative["CONDITIONING"],
            vae=vae["VAE"],
            clip_vision_output=seen["CLIP_VISION_OUTPUT"],
            start_image=image["IMAGE"],
            width=832,
            height=480,
            length=81,
        )
    patched = patch(
        sheet,
        unet["MODEL"],
        "balanced",
        "Self-attention over all frames runs in INT8; the two cross-attentions (picture and text) "
        "are short and stay in FP16. If the first frame drifts from your picture, keep the first "
        "blocks alone with `first 2` in *fp16_layers*.",
    )
    wan_sampling(sheet, patched, video["positive"], video["negative"], video["latent"], vae["VAE"])


def ltxv(sheet: Sheet) -> None:
    """LTX-Video, text to video"""
    sheet.column(330)
    with sheet.group("Models"):
        checkpoint = sheet.add(
            "CheckpointLoaderSimple",
            ckpt_name=model(
                "checkpoints",
                "ltx-video-2b-v0.9.safetensors",
                f"{HUB}/Lightricks/LTX-Video/resolve/main",
            ),
        )
        clip = sheet.add("CLIPLoader", clip_name=T5, type="ltxv")
    with sheet.group("Size", GREEN):
        latent = sheet.add("EmptyLTXVLatentVideo", width=768, height=512, length=97)
    sheet.column(360)
    with sheet.group("Prompt", GREEN):
        positive = prompt(
            sheet,
            clip["CLIP"],
            "A potter shapes a tall clay vase on a spinning wheel in a sunlit workshop. Her hands "
            "are wet and move slowly upwards while thin lines form in the clay. The camera is "
            "close and steady; dust floats in the light behind her and shelves of unglazed bowls "
            "stand out of focus.",
            height=190,
        )
        negative = prompt(
            sheet,
            clip["CLIP"],
            "low quality, distorted, motion smear, motion artefacts, deformed hands",
            "Negative prompt",
            height=100,
        )
        conditioning = sheet.add(
            "LTXVConditioning",
            positive=positive["CONDITIONING"],
            negative=negative["CONDITIONING"],
            frame_rate=25.0,
        )
    patched = patch(
        sheet,
        checkpoint["MODEL"],
        "balanced",
        "LTXV compresses video strongly, so its sequences are shorter than those of Wan or "
        "HunyuanVideo: the gain grows with size and length. Its text cross-attention carries a "
        "mask and stays in FP16 (*cross_attention*).",
    )
    sheet.column(315)
    with sheet.group("Sampling"):
        sigmas = sheet.add("LTXVScheduler", latent=latent["LATENT"], steps=30)
        sampler = sheet.add("KSamplerSelect", sampler_name="euler")
        sampled = sheet.add(
            "SamplerCustom",
            model=patched["MODEL"],
            positive=conditioning["positive"],
            negative=conditioning["negative"],
            sampler=sampler["SAMPLER"],
            sigmas=sigmas["SIGMAS"],
            latent_image=latent["LATENT"],
            noise_seed=42,
            cfg=3.0,
        )
    seen = report(sheet, sampled["output"], patched)
    sheet.column(400)
    with sheet.group("Video", PURPLE):
        frames = sheet.add("VAEDecode", samples=seen["samples"], vae=checkpoint["VAE"])
        save_video(sheet, frames["IMAGE"], 25, "ltxv_sageattention3")
