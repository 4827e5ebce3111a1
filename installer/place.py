"""Where the pack lies, how it gets into a ComfyUI, and the tools of it that run on their own."""

import os
import subprocess
from pathlib import Path

from .screen import SetupError

# Not resolved: where ComfyUI reaches the pack through a link, the link tells which ComfyUI it is.
ROOT = Path(os.path.abspath(__file__)).parent.parent


def run_tool(python: Path | str, *arguments: str) -> int:
    """Run ``demo/__main__.py`` with ``python``; its exit status."""
    command = [python, ROOT / "demo" / "__main__.py", *arguments]
    # What it prints may hold letters that this console does not know.
    environment = {"PYTHONIOENCODING": ":replace", **os.environ}
    return subprocess.run(command, env=environment, check=False).returncode


def link_folder(link: Path, target: Path) -> None:
    """Make ``link`` lead to the folder ``target``. Raises SetupError if something else is there."""
    if link.is_symlink() or link.exists():
        if link.resolve() == target.resolve():
            return
        raise SetupError(f"{link} is not a link to {target}: remove it and try again")
    if os.name == "nt":
        import _winapi

        _winapi.CreateJunction(str(target), str(link))  # a symlink needs rights, this does not
    else:
        link.symlink_to(target, target_is_directory=True)
