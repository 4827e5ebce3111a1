"""The image workflows: one function each, its docstring being the title."""

from typing import NamedTuple

from .parts import CLIP_L, HUB, QWEN, T5, model, patch, prompt, report, save_image
from .sheet import GREEN, Output, Sheet

FLUX_SAMPLING = {
    "seed": 42,
    "steps": 20,
    "cfg": 1.0,
    "sampler_name": "euler",
    "scheduler": "simple",
}


class Flux(NamedTuple):
    """What every graph of FLUX.1 dev starts from."""

    model: Output
    vae: Output
    latent: Output
    positive: Output
    negative: Output


def flux(sheet: Sheet) -> Flux:
    """The columns of a FLUX.1 dev graph before the sampler: files, size, prompt."""
    sheet.column(330)
    with sheet.group("Models"):
        unet = sheet.add(
            "UNETLoader",
            unet_name=model(
                "diffusion_models",
                "flux1-dev.safetensors",
                f"{HUB}/Comfy-Org/flux1-dev/resolve/main",
            ),
        )
        clip = sheet.add("DualCLIPLoader", clip_name1=CLIP_L, clip_name2=T5, type="flux")
        vae = sheet.add(
            "VAELoader",
            vae_name=model(
                "vae",
                "ae.safetensors",
                f"{HUB}/Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae",
            ),
        )
    with sheet.group("Size", GREEN):
        latent = sheet.add("EmptySD3LatentImage", width=1024, height=1024)
    sheet.column(360)
    with sheet.group("Prompt", GREEN):
        text = prompt(
            sheet,
            clip["CLIP"],
            "A lighthouse keeper's desk at dusk: brass instruments, a half-written letter and a "
            "cup of tea, warm lamp light, rain on the window, photograph",
        )
        positive = sheet.add("FluxGuidance", conditioning=text["CONDITIONING"], guidance=3.5)
        negative = sheet.add("ConditioningZeroOut", conditioning=text["CONDITIONING"])
    return Flux(
        unet["MODEL"],
        vae["VAE"],
        latent["LATENT"],
        positive["CONDITIONING"],
        negative["CONDITIONING"],
    )


def flux_dev(sheet: Sheet) -> None:
    """FLUX.1 dev, text to image"""
    start = flux(sheet)
    patched = patch(
        sheet,
        start.model,
        "quality",
        "**quality** keeps the first and the last block in FP16 and runs the rest in INT8; try "
        "**balanced** when the picture holds. Flux has `double.0-18` and `single.0-37`: name any "
        "of them in *fp16_layers* to leave them alone.",
    )
    sheet.column(315)
    with sheet.group("Sampling"):
        sampled = sheet.add(
            "KSampler",
            model=patched["MODEL"],
            positive=start.positive,
            negative=start.negative,
            latent_image=start.latent,
            **FLUX_SAMPLING,
        )
    seen = report(sheet, sampled["LATENT"], patched)
    save_image(sheet, seen["samples"], start.vae, "flux_sageattention3")


def sd3_5_large(sheet: Sheet) -> None:
    """SD 3.5 Large, text to image"""
    sheet.column(330)
    with sheet.group("Models"):
        checkpoint = sheet.add(
            "CheckpointLoaderSimple",
            ckpt_name=model(
                "checkpoints",
                "sd3.5_large_fp8_scaled.safetensors",
                f"{HUB}/Comfy-Org/stable-diffusion-3.5-fp8/resolve/main",
            ),
        )
    with sheet.group("Size", GREEN):
        latent = sheet.add("EmptySD3LatentImage", width=1024, height=1024)
    sheet.column(360)
    with sheet.group("Prompt", GREEN):
        positive = prompt(
            sheet,
            checkpoint["CLIP"],
            "An old greenhouse overgrown with ferns, morning mist, light through dusty glass, wide "
            "angle photograph",
        )
        negative = prompt(sheet, checkpoint["CLIP"], "", "Negative prompt", height=100)
    patched = patch(
        sheet,
        checkpoint["MODEL"],
        "quality",
        "**quality** keeps the first and the last block in FP16 and runs the rest in INT8. At "
        "1024x1024 attention is a small part of the work: expect more from it at larger sizes.",
    )
    sheet.column(315)
    with sheet.group("Sampling"):
        sampled = sheet.add(
            "KSampler",
            model=patched["MODEL"],
            positive=positive["CONDITIONING"],
            negative=negative["CONDITIONING"],
            latent_image=latent["LATENT"],
            seed=42,
            steps=20,
            cfg=4.0,
            sampler_name="euler",
            scheduler="sgm_uniform",
        )
    seen = report(sheet, sampled["LATENT"], patched)
    save_image(sheet, seen["samples"], checkpoint["VAE"], "sd3_5_sageattention3")


def qwen_image(sheet: Sheet) -> None:
    """Qwen-Image, text to image"""
    sheet.column(330)
    with sheet.group("Models"):
        unet = sheet.add(
            "UNETLoader",
            unet_name=model(
                "diffusion_models",
                "qwen_image_fp8_e4m3fn.safetensors",
                f"{QWEN}/diffusion_models",
            ),
        )
        clip = sheet.add(
            "CLIPLoader",
            clip_name=model(
                "text_encoders", "qwen_2.5_vl_7b_fp8_scaled.safetensors", f"{QWEN}/text_encoders"
            ),
            type="qwen_image",
        )
        vae = sheet.add(
            "VAELoader", vae_name=model("vae", "qwen_image_vae.safetensors", f"{QWEN}/vae")
        )
    with sheet.group("Size", GREEN):
        latent = sheet.add("EmptySD3LatentImage", width=1328, height=1328)
    sheet.column(360)
    with sheet.group("Prompt", GREEN):
        positive = prompt(
            sheet,
            clip["CLIP"],
            'A small bookshop at night with a hand-painted sign that reads "OPEN LATE", wet '
            "pavement reflecting the window, film photograph",
        )
        negative = prompt(sheet, clip["CLIP"], "", "Negative prompt", height=100)
    patched = patch(
        sheet,
        unet["MODEL"],
        "quality",
        "Qwen-Image writes text in pictures, and lettering shows quantisation first: **quality** "
        "keeps the first and the last block in FP16. Read the report after the run: every layer "
        "that stayed with ComfyUI's own attention is listed there with the reason.",
    )
    sheet.column(315)
    with sheet.group("Sampling"):
        shifted = sheet.add("ModelSamplingAuraFlow", model=patched["MODEL"], shift=3.1)
        sampled = sheet.add(
            "KSampler",
            model=shifted["MODEL"],
            positive=positive["CONDITIONING"],
            negative=negative["CONDITIONING"],
            latent_image=latent["LATENT"],
            seed=42,
            steps=20,
            cfg=2.5,
            sampler_name="euler",
            scheduler="simple",
        )
    seen = report(sheet, sampled["LATENT"], patched)
    save_image(sheet, seen["samples"], vae["VAE"], "qwen_image_sageattention3")
