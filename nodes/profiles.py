"""Profiles by name, under ComfyUI's user folder; nodes that load and save them."""

import re
import unicodedata
from pathlib import Path
from typing import Any

from .engine import profile_file
from .engine.advice import describe_profile
from .engine.budget import choose
from .engine.error_chart import error_chart
from .engine.profile import TYPE, Profile, ProfileError, require_profile
from .engine.words import shorten
from .shown import shown

NONE = "none"  # the menu's entry for no profile
MAX_ERROR = (
    "FLOAT",
    {
        "default": 0.05,
        "min": 0.0,
        "max": 1.0,
        "step": 0.001,
        "tooltip": "Only with a profile: how far the final latent may be from full precision's, "
        "as relative L1. Each layer then runs in whatever is fastest within that. 0: everything "
        "in fp16. 0.01 is hard to see; 0.1 changes details.",
    },
)
_SUFFIX = ".safetensors"
_NAME = re.compile(r"[\w\-()+,][\w\-()+,. ]{0,99}")


def folder() -> Path:
    import folder_paths  # ComfyUI's

    return Path(folder_paths.get_user_directory(), "default", "sageattention3", "profiles")


def names() -> list[str]:
    """Names of the saved profiles."""
    return sorted(path.stem for path in folder().glob(f"*{_SUFFIX}"))


def path_of(name: str) -> Path:
    """Where the profile ``name`` is or would be. Raises ProfileError if that is no name."""
    plain = unicodedata.normalize("NFC", name).strip()
    if not _NAME.fullmatch(plain) or plain.endswith(".") or plain == NONE:
        raise ProfileError(
            f"`{shorten(name)}` can't be the name of a profile: use letters, digits, spaces and "
            "- _ . ( ) + , only, at most 100, and not `none`"
        )
    return folder() / f"{plain}{_SUFFIX}"


def missing(name: str) -> str:
    """What is wrong if there is no profile ``name``, and what to do; empty if there is one."""
    try:
        path = path_of(name)
    except ProfileError as error:
        return str(error)
    if path.is_file():
        return ""
    known = ", ".join(map(shorten, names()[:8])) or "none yet: SageAttention3 Calibrate makes them"
    return f"there is no profile `{shorten(name)}` in {folder()}. Saved profiles: {known}"


def load_named(name: str) -> Profile:
    if fault := missing(name):
        raise ProfileError(fault)
    return profile_file.load(path_of(name))


def state_of(name: str) -> str:
    """Changes when the file of ``name`` does: for IS_CHANGED."""
    if name == NONE or missing(name):
        return ""
    stat = path_of(name).stat()
    return f"{stat.st_mtime_ns} {stat.st_size}"


class SageAttention3LoadProfile:
    TITLE = "SageAttention3 Load Profile"
    CATEGORY = "SageAttention3"
    DESCRIPTION = (
        "Loads the measured errors of a model's layers and shows what an error budget makes of "
        "them. Try budgets here: nothing is measured again."
    )
    RETURN_TYPES = (TYPE, "IMAGE", "STRING")
    RETURN_NAMES = ("profile", "chart", "report")
    OUTPUT_TOOLTIPS = (
        "For the profile input of SageAttention3 Patch.",
        "Layers by precision: what each would cost, and what the budget chooses.",
        "The choice in words, what keeping a few layers in fp16 does, the worst layers.",
    )
    OUTPUT_NODE = True
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        menu = (
            [NONE, *names()],
            {"tooltip": "A profile that SageAttention3 Calibrate or Save Profile has saved."},
        )
        return {"required": {"profile_name": menu, "max_error": MAX_ERROR}}

    @classmethod
    def VALIDATE_INPUTS(cls, profile_name=None):  # noqa: N802
        if profile_name is None:  # comes from a link, known only later
            return True
        if profile_name == NONE:
            return "choose a profile; SageAttention3 Calibrate makes them"
        return missing(profile_name) or True

    @classmethod
    def IS_CHANGED(cls, profile_name, **_: Any) -> str:  # noqa: N802
        return state_of(profile_name)

    def load(self, profile_name: str, max_error: float) -> dict:
        profile = load_named(profile_name)
        ui, chart, text = show_profile(profile, max_error)
        return {"ui": ui, "result": (profile, chart, text)}


class SageAttention3SaveProfile:
    TITLE = "SageAttention3 Save Profile"
    CATEGORY = "SageAttention3"
    DESCRIPTION = (
        "Saves a profile under a name of its own, among the profiles that SageAttention3 Patch and "
        "Load Profile list. The file works on any machine with the same model."
    )
    RETURN_TYPES = (TYPE,)
    RETURN_NAMES = ("profile",)
    OUTPUT_TOOLTIPS = ("The profile, unchanged.",)
    OUTPUT_NODE = True
    FUNCTION = "save"

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {
            "required": {
                "profile": (TYPE, {"tooltip": "From SageAttention3 Calibrate or Load Profile."}),
                "name": (
                    "STRING",
                    {
                        "default": "my profile",
                        "tooltip": "Name of the file, without ending. A profile of that name is "
                        "replaced.",
                    },
                ),
            }
        }

    @classmethod
    def VALIDATE_INPUTS(cls, name=None):  # noqa: N802
        return check_name(name)

    def save(self, profile: Any, name: str) -> tuple[Profile]:
        profile_file.save(require_profile(profile), path_of(name))
        return (profile,)


def check_name(name: str | None) -> bool | str:
    """For VALIDATE_INPUTS: True, or why ``name`` can't be a profile's. None comes from a link."""
    if name is not None:
        try:
            path_of(name)
        except ProfileError as error:
            return str(error)
    return True


def show_profile(profile: Profile, max_error: float) -> tuple[dict, Any, str]:
    """What a node shows of ``profile``: its ui entry, the chart [1, H, W, 3] and the report."""
    choice = choose(profile, max_error)
    chart = error_chart(profile, choice)
    text = describe_profile(profile, choice, max_error)
    return shown(text, chart), chart, text
