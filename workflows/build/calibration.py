"""The workflow that measures a model first and then samples within an error budget."""

from .images import FLUX_SAMPLING, flux
from .parts import patch, report, save_image
from .sheet import PURPLE, Sheet


def calibrate_and_compare(sheet: Sheet) -> None:
    """Calibrate, sample within a budget, compare"""
    start = flux(sheet)
    sampling = {
        "positive": start.positive,
        "negative": start.negative,
        "latent_image": start.latent,
        **FLUX_SAMPLING,
    }
    sheet.column(560)
    with sheet.group("Measure once", PURPLE):
        measured = sheet.add(
            "SageAttention3Calibrate",
            model=start.model,
            name="flux1-dev",
            min_height=1000,
            **sampling,
        )
    patched = patch(
        sheet,
        start.model,
        "balanced",
        "With a profile connected, **max_error** decides in the place of the preset: each layer "
        "runs in whatever is fastest while the final latent stays that close to full precision. "
        "The profile is saved too: in other graphs choose it in *profile_name* and leave "
        "SageAttention3 Calibrate out.",
        profile=measured["profile"],
    )
    sheet.column(315)
    with sheet.group("Sampling"):
        sampled = sheet.add("KSampler", model=patched["MODEL"], **sampling)
    seen = report(sheet, sampled["LATENT"], patched)
    sheet.column(560)
    with sheet.group("How close", PURPLE):
        sheet.add(
            "SageAttention3Compare",
            reference=measured["samples"],
            result=seen["samples"],
            min_height=520,
        )
    save_image(sheet, seen["samples"], start.vae, "calibrated_sageattention3")
