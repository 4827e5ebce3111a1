"""Installs the pack into a ComfyUI: its folder, what it lacks, its kernels, and a look at all.

Answers 0 wherever the nodes load, also without a GPU or offline: the pack serves with less, and
says so.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from . import advice, comfyui, doctor, packages, probe
from .place import ROOT, link_folder, run_tool
from .screen import SetupError, stage

# Without these nothing is built.
BUILD_NEEDS = {packages.BINDINGS, "filelock", "ninja", "platformdirs", "psutil"}


def install(chosen: Path | None = None) -> int:
    """Install into ComfyUI ``chosen``, or that around the pack, or that of the running Python.

    Raises SetupError where there is no such ComfyUI, or no Python of it.
    """
    root = comfyui.find(chosen)
    if chosen is not None and root is None:
        raise SetupError(f"{chosen} is no ComfyUI: it has no folder custom_nodes.")
    if root is None and sys.stdin is not None and sys.stdin.isatty():
        root = _ask()
    python = _find_python(root, chosen)
    if root is not None:
        link(root)
    if not _is_this(python):
        print(f"SageAttention3: ComfyUI's Python is {python}", flush=True)
        command = [python, ROOT / "install.py", "install", "--comfyui", root]
        return subprocess.run(command, check=False).returncode
    return _install_here(root)


def link(root: Path) -> None:
    """Make ComfyUI in ``root`` see the pack, wherever that lies."""
    nodes = root / "custom_nodes"
    if any(pack.resolve() == ROOT.resolve() for pack in nodes.iterdir()):
        return
    link_folder(nodes / ROOT.name, ROOT)
    print(f"SageAttention3: linked into {nodes}")


def _install_here(root: Path | None) -> int:
    with stage("SageAttention3: looking at torch"):
        torch = probe.ask(probe.TORCH).get("torch", {})
    cuda = torch.get("cuda") or ""
    if missing := packages.find_missing(cuda):
        with stage(f"SageAttention3: installing {', '.join(missing)}"):
            wrong = packages.add(missing)
        if wrong:
            print(
                f"SageAttention3: not everything could be installed:\n{wrong}\n"
                "Is this machine online? Once it is, run this again."
            )
    needed = BUILD_NEEDS & {packages.name_of(line) for line in packages.find_missing(cuda)}
    if torch.get("gpus") and not needed and run_tool(sys.executable, "build", "--brief"):
        print("SageAttention3: not all kernels were built; the first run tries again.")
    with stage("SageAttention3: trying every kernel once"):
        report = doctor.examine(root)
    doctor.print_screen(report)
    if doctor.exit_status(report) == 0:
        print("\nDone. Restart ComfyUI to load it; look for nodes by the name sage.")
    return doctor.exit_status(report)


def _find_python(root: Path | None, chosen: Path | None) -> Path:
    """The Python to install into: the running one if it can be ComfyUI's, else that of ``root``."""
    if chosen is None and comfyui.has_torch(sys.executable):
        return Path(sys.executable)
    python = comfyui.find_python(root) if root is not None else None
    if python is None:
        raise SetupError(advice.without_torch(root is not None).text)
    return python


def _is_this(python: Path) -> bool:
    """Whether ``python`` is the one running; environments are told by folder, not by program."""
    return python.parent.resolve() == Path(sys.executable).parent.resolve()


def _ask() -> Path | None:
    """The ComfyUI that the person at the keyboard means; None for none."""
    found = list(dict.fromkeys(filter(None, map(comfyui.find, _usual_places()))))
    print("The pack lies in no ComfyUI. Into which one shall it go?")
    for number, root in enumerate(found, 1):
        print(f"  {number}  {root}")
    words = input("Number or folder, or nothing to go on without: ").strip().strip("\"'")
    if not words:
        return None
    if words.isdigit() and 1 <= int(words) <= len(found):
        return found[int(words) - 1]
    root = comfyui.find(Path(words).expanduser())
    if root is None:
        raise SetupError(f"{words} is no ComfyUI: it has no folder custom_nodes.")
    return root


def _usual_places() -> Iterator[Path]:
    home = Path.home()
    portable = "ComfyUI_windows_portable"
    for folder in (ROOT.parent, home, home / "Documents", home / "comfy", home / "Desktop"):
        yield folder / "ComfyUI"
        yield folder / portable
    if os.name == "nt":
        for drive in "CDE":
            yield Path(f"{drive}:/{portable}")
            yield Path(f"{drive}:/ComfyUI")
