"""The environment of demo and test: ``.venv`` beside the pack, with pinned requirements."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys

from .packages import pick_errors
from .place import ROOT
from .screen import SetupError, stage

VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
LOG = VENV / "install.log"
STAMP = VENV / "installed"

HOST_REQUIREMENTS = ROOT / "requirements-host.txt"
TORCH = "torch==2.13.0"
# The first belongs to that torch. Its compiled part does not load beside a torch that came from
# another place than the registry; the host needs only the part in Python, and there the second,
# which does without the compiled one, is enough.
TORCHVISION = ("torchvision==0.28.0", "torchvision==0.15.2")


def make_environment() -> None:
    """Make ``.venv`` with the pinned requirements, or what is missing of it."""
    wanted = fingerprint()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return
    print(f"Setting up in {VENV} (once; a few minutes)")
    if not works(PYTHON):
        with stage("Python environment"):
            make_venv()
    STAMP.unlink(missing_ok=True)
    with stage("PyTorch"):
        pip_install(TORCH)
    with stage("ComfyUI's requirements and the test tools"):
        pip_install("-r", str(HOST_REQUIREMENTS))
    with stage("torchvision"):
        install_torchvision()
    STAMP.write_text(wanted)


def fingerprint() -> str:
    """Changes when the environment has to be made anew."""
    parts = (TORCH, *TORCHVISION, HOST_REQUIREMENTS.read_text(encoding="utf-8"), sys.version)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def works(python: os.PathLike) -> bool:
    """Whether the environment of ``python`` can be gone on with: the same Python, with pip."""
    if not os.path.exists(python):
        return False
    same = f"import sys, pip; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    return subprocess.run([python, "-c", same], capture_output=True, check=False).returncode == 0


def make_venv() -> None:
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise SetupError(
            f"Python could not make a virtual environment in {VENV}:\n"
            f"{(done.stderr or done.stdout).strip()}\n"
            "On Debian and Ubuntu, `apt install python3-venv` adds what is missing."
        )


def pip_install(*what: str) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *what]
    with LOG.open("a", encoding="utf-8", errors="replace") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        free = shutil.disk_usage(ROOT).free / 1e9
        raise SetupError(
            f"pip could not install {' '.join(what)}:\n"
            + pick_errors(LOG.read_text(encoding="utf-8", errors="replace"))
            + f"\nIs this machine online? {free:.0f} GB of disk are free. The whole log: {LOG}"
        )


def install_torchvision() -> None:
    for version in TORCHVISION:
        with contextlib.suppress(SetupError):
            pip_install("--no-deps", version)
            command = [PYTHON, "-c", "import torchvision"]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return
    raise SetupError(
        f"no torchvision that works beside {TORCH} could be installed (tried "
        f"{', '.join(TORCHVISION)}). The log: {LOG}"
    )
