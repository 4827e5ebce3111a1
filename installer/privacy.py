"""Makes a report safe to paste: no user name, and no path outside of the pack."""

import getpass
import os
import re
import sys
import tempfile
from pathlib import Path

from .place import ROOT

# An absolute path: its folders, then its last name. Spaces are taken for part of a folder's name
# only up to the next separator, so that "in C:\A B\c.dll is" loses "C:\A B".
_PATH = re.compile(
    r"""(?<![\w.>:/\\])(?:[A-Za-z]:[\\/]|\\\\|/)(?:[^\\/:*?"'<>|\n]{1,80}[\\/])+([^\\/\s:*?"'<>|,;)]*)"""
)


def clean(report: object, comfyui: Path | None = None) -> object:
    """``report``, strings, lists and dicts, with each path named by what it is."""
    known = {
        ROOT: "<pack>",
        ROOT.resolve(): "<pack>",
        Path(sys.prefix): "<Python>",
        Path(sys.base_prefix): "<Python>",
        Path(tempfile.gettempdir()): "<temporary files>",
        Path.home(): "~",
    }
    if comfyui is not None:
        known[comfyui] = "<ComfyUI>"
    # The longest first: the pack lies in ComfyUI, and that may lie in the home folder.
    names = sorted(
        ((str(path), name) for path, name in known.items() if len(path.parts) > 1),
        key=lambda item: -len(item[0]),
    )
    return _walk(report, names)


def _walk(value: object, names: list[tuple[str, str]]) -> object:
    if isinstance(value, str):
        return _clean_text(value, names)
    if isinstance(value, dict):
        return {key: _walk(item, names) for key, item in value.items()}
    return [_walk(item, names) for item in value] if isinstance(value, list) else value


def _clean_text(text: str, names: list[tuple[str, str]]) -> str:
    for path, name in names:
        text = text.replace(path, name)
    text = _PATH.sub(lambda match: f"<elsewhere>/{match[1]}", text)
    user = _user()
    # As a part of a path alone: a user may be named as a word that reports need.
    return re.sub(rf"(?<=[\\/]){re.escape(user)}(?=[\\/])", "<user>", text) if user else text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # services have none
        return os.environ.get("USERNAME", "")
