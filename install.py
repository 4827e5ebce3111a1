#!/usr/bin/env python3
"""Installer of the pack, its kernel build, and the two commands of its README.

    python install.py          inside ComfyUI: install what the pack lacks (never torch), and build
                               the kernels of this machine's GPUs
    python install.py build    build kernels ahead of time; needs no GPU. --arch sm_89,sm_120a names
                               GPUs, --report FILE.json keeps resources and instruction counts
    python install.py demo     run the shipped workflows on tiny models in a real ComfyUI
    python install.py test     run every test that needs no GPU; --no-browser leaves the frontend
                               out, further options go to pytest

demo and test work in ``.venv`` and ``.host`` beside this file and touch nothing else; so does build
where the Python that runs it has no PyTorch. All may be interrupted at any point and started again;
what is done is not done twice. Only the standard library is used here, since nothing else is there
yet.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
LOG = VENV / "install.log"
STAMP = VENV / "installed"
OLDEST_PYTHON = (3, 10)

COMMANDS = ("install", "build", "demo", "test")
REQUIREMENTS = ROOT / "requirements.txt"
HOST_REQUIREMENTS = ROOT / "requirements-host.txt"
TORCH = "torch==2.13.0"
# The first belongs to that torch. Its compiled part does not load beside a torch that came from
# another place than the registry; the host needs only the part in Python, and there the second,
# which does without the compiled one, is enough.
TORCHVISION = ("torchvision==0.28.0", "torchvision==0.15.2")

HEARTBEAT_SECONDS = 30


class SetupError(Exception):
    """What is wrong and what to do, in words for the person at the keyboard."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="install.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="install")
    parsed, options = parser.parse_known_args(arguments)
    if options and parsed.command in ("install", "demo"):
        parser.error(f"{parsed.command} takes no options: {' '.join(options)}")
    try:
        if parsed.command == "install":
            return install()
        if parsed.command == "build":
            return build(options)
        make_environment()
        if parsed.command == "demo":
            return run_tool(PYTHON, "demo")
        return test(options)
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Start the same command again to go on.", file=sys.stderr)
        return 130


# --- inside ComfyUI, and the kernels -------------------------------------------------------------


def install() -> int:
    """Install what is missing into the Python that runs this, then build the kernels.

    Answers 0 also where something can't be had: the pack serves with less, and says so.
    torch is ComfyUI's own affair: another torch than the one it came with breaks it.
    """
    cuda = torch_cuda()
    missing = [line for line in read_requirements(cuda) if not is_met(line)]
    if missing:
        print(f"SageAttention3: installing {', '.join(missing)}")
        command = [sys.executable, "-m", "pip", "install", *missing]
        if subprocess.run(command, check=False).returncode:
            print(
                f"SageAttention3: pip could not install {', '.join(missing)} (its words are "
                "above). The nodes work all the same, but some of this is left out: the "
                "pictures, comparisons, profiles, or the fast kernels. Once the cause is mended, "
                "run this again."
            )
            return 0
    if cuda and has_gpu() and run_tool(Path(sys.executable), "build"):
        print("SageAttention3: not all kernels were built; the first run tries again.")
    print("SageAttention3: done. Restart ComfyUI to load it.")
    return 0


def torch_cuda() -> str:
    """Version of CUDA that this Python's torch was made for, e.g. "13.0"; empty if it has none."""
    if importlib.util.find_spec("torch") is None:
        return ""
    import torch

    return torch.version.cuda or ""


def has_gpu() -> bool:
    """Whether torch sees one. Where an image is made for other machines, it does not."""
    import torch

    return torch.cuda.is_available()


def read_requirements(cuda: str = "") -> list[str]:
    """Runtime requirements. cuda-bindings loads only NVRTC of its own major version: torch's."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    if cuda:
        major = cuda.partition(".")[0]
        lines = [re.sub(r"^cuda-bindings[^;]*", f"cuda-bindings=={major}.*", x) for x in lines]
    return lines


def is_met(requirement: str) -> bool:
    """Whether the running Python has it; of versions, only a major one asked for is looked at."""
    name, major = re.match(r"([\w-]+)(?:==(\d+)\.\*)?", requirement).groups()
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return major is None or version.partition(".")[0] == major


def build(options: list[str]) -> int:
    """Build kernels with the Python that runs this if it has a torch, else in ``.venv``."""
    if importlib.util.find_spec("torch"):
        return run_tool(Path(sys.executable), "build", *options)
    make_environment()
    return run_tool(PYTHON, "build", *options)


# --- the environment of demo and test ------------------------------------------------------------


def make_environment() -> None:
    """Make ``.venv`` with the pinned requirements, or what is missing of it."""
    if sys.version_info < OLDEST_PYTHON:
        version = ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(f"Python {version} or newer is needed; this is {sys.version.split()[0]}.")
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


def works(python: Path) -> bool:
    """Whether the environment of ``python`` can be gone on with: the same Python, with pip."""
    if not python.exists():
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
        lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR")][-3:] or lines[-3:]
        free = shutil.disk_usage(ROOT).free / 1e9
        raise SetupError(
            f"pip could not install {' '.join(what)}:\n"
            + "\n".join(f"  {line[:300]}" for line in errors)
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


# --- the two commands ----------------------------------------------------------------------------


def run_tool(python: Path, *arguments: str) -> int:
    """Run ``demo/__main__.py``."""
    command = [python, ROOT / "demo" / "__main__.py", *arguments]
    return subprocess.run(command, check=False).returncode


def test(options: list[str]) -> int:
    """Lint, format check and the whole test suite; pytest's own closing line comes last.

    ``--no-browser`` among the options leaves the frontend out; the others go to pytest.
    """
    browser = "--no-browser" not in options
    options = [option for option in options if option != "--no-browser"]
    if run_tool(PYTHON, "prepare", *(["--browser"] if browser else [])):
        return 1
    for check in (["check"], ["format", "--check"]):
        command = [PYTHON, "-m", "ruff", *check, ROOT]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            return 1
    command = [
        PYTHON,
        "-m",
        "pytest",
        "-n",
        str(min(4, os.cpu_count() or 1)),
        "--dist",
        "loadgroup",
    ]
    if not browser:
        command += ["-m", "not gpu and not browser"]
    # One thread of torch per worker: more would wait for each other on busy cores most of the time.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += options
    if not any((ROOT / option.partition("::")[0]).exists() for option in options):
        command.append("tests")
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


# --- the screen ----------------------------------------------------------------------------------


@contextlib.contextmanager
def stage(title: str):
    """A line that shows the time while the stage lasts: live on a terminal, else now and then."""
    started, live, over = time.monotonic(), sys.stdout.isatty(), threading.Event()

    def show(end: str) -> None:
        print(f"{title} {time.monotonic() - started:4.0f} s", end=end, flush=True)

    def tick() -> None:
        while not over.wait(1.0 if live else HEARTBEAT_SECONDS):
            show("\r" if live else "\n")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        over.set()
        ticker.join()
        show("\n")


if __name__ == "__main__":
    sys.exit(main())
