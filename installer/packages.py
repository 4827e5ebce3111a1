"""The pack's own requirements: what is missing of them, and how it gets in without harm.

torch is ComfyUI's affair: another torch than the one it came with breaks it. So every package that
is there already is pinned to its version while ours are installed.
"""

import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .place import ROOT

REQUIREMENTS = ROOT / "requirements.txt"
BINDINGS = "cuda-bindings"

_NAME = re.compile(r"[\w.-]+")
_BOUND = re.compile(r"(>=|<)([\d.]+)")
_PLAIN_VERSION = re.compile(r"\d+(\.\d+)*([a-z]+\d+)?(\.(post|dev)\d+)?(\+[\w.]+)?")


def read_requirements(cuda: str = "") -> list[str]:
    """Lines for pip. cuda: that of torch, e.g. "12.8"; empty if it has none.

    The bindings load only an NVRTC of their own major version, and that is torch's. Without CUDA
    there is nothing for them to do.
    """
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    if not cuda:
        return [line for line in lines if name_of(line) != BINDINGS]
    major = int(cuda.partition(".")[0])
    oldest = "12.9" if major == 12 else f"{major}"
    ours = f"{BINDINGS}>={oldest},<{major + 1}"
    return [ours if name_of(line) == BINDINGS else line for line in lines]


def find_missing(cuda: str) -> list[str]:
    return [line for line in read_requirements(cuda) if not is_met(line)]


def name_of(requirement: str) -> str:
    return _NAME.match(requirement)[0]


def is_met(requirement: str) -> bool:
    """Whether the running Python has it, in a version between the bounds asked for."""
    version = installed_version(name_of(requirement))
    if version is None:
        return False
    numbers = _numbers(version)
    bounds = _BOUND.findall(requirement.partition(";")[0])
    return all(
        numbers >= _numbers(bound) if sign == ">=" else numbers < _numbers(bound)
        for sign, bound in bounds
    )


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def add(requirements: list[str]) -> str | None:
    """Install them into the running Python and change nothing else; what went wrong, if it did."""
    tool = _tool()
    if tool is None:
        return "  this Python has no pip, and there is no uv beside it"
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "installed.txt")
        pins.write_text("\n".join(_pins({name_of(line) for line in requirements})), "utf-8")
        command = [*tool, "--constraint", str(pins), *requirements]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    importlib.invalidate_caches()
    return pick_errors(done.stdout) if done.returncode else None


def pick_errors(log: str) -> str:
    """The lines of pip's log that say what went wrong, indented."""
    lines = log.splitlines()
    errors = [line for line in lines if line.lower().startswith("error")][-3:] or lines[-3:]
    return "\n".join(f"  {line[:300]}" for line in errors)


def _tool() -> list[str] | None:
    """pip, or uv, which ComfyUI Desktop makes its environment with, without a pip in it."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    uv = [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else [shutil.which("uv")]
    return [*uv, "pip", "install", "--python", sys.executable] if uv[0] else None


def _pins(free: set[str]) -> list[str]:
    """``name==version`` of what is installed, but for the packages named in ``free``."""
    free = {_normal(name) for name in free}
    found = {}
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        # pip refuses the whole list for one version that is none; some old packages have such.
        if name and version and _PLAIN_VERSION.fullmatch(version) and _normal(name) not in free:
            found.setdefault(_normal(name), f"{name}=={version}")
    return sorted(found.values())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(
        int(part) for part in re.match(r"[\d.]*", version)[0].strip(".").split(".") if part
    )
