"""The ComfyUI around the pack: where it is, its version, its Python, who else changes attention."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .place import ROOT

OLDEST = (0, 3, 60)  # the first release with attention overrides

# What a flag at ComfyUI's start means for this pack.
FLAGS = {
    "--use-sage-attention": "calls that this pack leaves to ComfyUI run in SageAttention",
    "--use-flash-attention": "calls that this pack leaves to ComfyUI run in FlashAttention",
    "--use-split-cross-attention": "calls that this pack leaves to ComfyUI run slower",
    "--use-quad-cross-attention": "calls that this pack leaves to ComfyUI run slower",
    "--use-ck-attention": "calls that this pack leaves to ComfyUI run in INT8 of comfy-kitchen",
    "--force-upcast-attention": "calls that this pack leaves to ComfyUI run in FP32, slower",
    "--cpu": "no GPU is used at all",
    "--directml": "NVIDIA's CUDA is not used, so neither are the kernels",
    "--disable-all-custom-nodes": "this pack is not loaded",
}
# Packages that change what ComfyUI's own attention is made of.
ATTENTION_PACKAGES = (
    "sageattention",
    "sageattn3",
    "flash-attn",
    "xformers",
    "comfy-kitchen",
)

_SCRIPTS = {".bat", ".cmd", ".sh", ".ps1"}
_COMMENT = re.compile(r"\s*(#|::|@?rem\b)", re.IGNORECASE)
_HOOK = re.compile(
    rb"optimized_attention_override|\.optimized_attention(_masked)?\s*=[^=]"
    rb"|set_model_optimized_attention"
)
_NOT_SEARCHED = {".git", ".venv", "venv", "node_modules", "site-packages", "__pycache__", "tests"}


def find(chosen: Path | None = None) -> Path | None:
    """The folder that holds ``custom_nodes``: the chosen one, or that around the pack.

    Where ComfyUI's programs lie elsewhere (Desktop, ``--base-directory``), that is its base folder.
    """
    if chosen is not None:
        within = [chosen, chosen / "ComfyUI"]  # of the portable build, people name either
        return next((folder for folder in within if (folder / "custom_nodes").is_dir()), None)
    for folder in ROOT.parents:
        if folder.name == "custom_nodes":
            return folder.parent
    named = os.environ.get("COMFYUI_PATH")  # ComfyUI-Manager says it
    return find(Path(named)) if named else None


def find_version(root: Path) -> str | None:
    """Of the ComfyUI in ``root``; None if its programs are not there or are older than 0.3.7."""
    try:
        text = (root / "comfyui_version.py").read_text("utf-8", "replace")
    except OSError:
        return None
    found = re.search(r'__version__\s*=\s*"([^"]+)"', text)
    return found[1] if found else None


def is_too_old(version: str) -> bool:
    return tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST


def find_python(root: Path) -> Path | None:
    """The Python that ComfyUI in ``root`` runs in: the first of the usual ones that has torch."""
    return next((python for python in _pythons(root) if has_torch(python)), None)


def has_torch(python: Path | str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


def find_flags(root: Path) -> list[dict]:
    """Flags in what starts ComfyUI, scripts or Desktop's settings, and what they mean here."""
    found = [
        {"flag": flag, "where": "ComfyUI Desktop's settings", "means": FLAGS[flag]}
        for flag in _desktop_flags(root)
        if flag in FLAGS
    ]
    for script in _start_scripts(root):
        lines = script.read_text("utf-8", "replace").splitlines()
        words = {
            w for line in lines if not _COMMENT.match(line) for w in re.findall(r"--[\w-]+", line)
        }
        found += [
            {"flag": flag, "where": script.name, "means": FLAGS[flag]}
            for flag in FLAGS
            if flag in words
        ]
    return found


def find_other_packs(root: Path) -> tuple[list[str], list[str]]:
    """Folders in ``custom_nodes`` that change attention as well, and copies of this very pack."""
    changing, copies = [], []
    own = ROOT.resolve()
    for pack in sorted((root / "custom_nodes").iterdir()):
        place = pack.resolve()
        if own in (place, *place.parents) or not pack.is_dir() or pack.suffix == ".disabled":
            continue
        if (pack / "nodes" / "load_diffusion_model.py").exists() and (pack / "kernels").is_dir():
            copies.append(pack.name)
        elif any(_HOOK.search(_bytes(file)) for file in _python_files(pack)):
            changing.append(pack.name)
    return changing, copies


def _pythons(root: Path) -> Iterator[Path]:
    windows = os.name == "nt"
    inside = "Scripts/python.exe" if windows else "bin/python"
    if windows:
        yield root.parent / "python_embeded" / "python.exe"
        yield root.parent / "python_embedded" / "python.exe"
    for folder in (root, root.parent):
        for name in (".venv", "venv", "env"):
            yield folder / name / inside
    if environment := os.environ.get("VIRTUAL_ENV"):
        yield Path(environment) / inside
    if environment := os.environ.get("CONDA_PREFIX"):
        yield Path(environment) / ("python.exe" if windows else inside)
    yield Path(sys.executable)


def _desktop_flags(root: Path) -> list[str]:
    try:
        settings = (root / "user" / "default" / "comfy.settings.json").read_text("utf-8")
        arguments = json.loads(settings).get("Comfy.Server.LaunchArgs", {})
    except (OSError, ValueError, AttributeError):
        return []
    return [f"--{name.lstrip('-').replace('_', '-')}" for name in arguments]


def _start_scripts(root: Path) -> Iterator[Path]:
    for folder in (root, root.parent):
        for path in sorted(folder.iterdir()):
            if path.suffix.lower() in _SCRIPTS and path.stat().st_size < 100_000:
                yield path


def _python_files(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_SEARCHED]
        yield from (Path(place, name) for name in files if name.endswith(".py"))


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
