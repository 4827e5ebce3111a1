"""Where a figure comes from, and what the command lines of all scripts have in common."""

import argparse
import json
import platform
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent


def commit_of(*paths: str) -> str:
    """The last commit that touched ``paths``, marked where they have changed since.

    Empty where there is no git: an unpacked archive.
    """

    def git(*arguments: str) -> str:
        command = ["git", *arguments, "--", *paths]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("log", "-1", "--format=%h")
        return commit and commit + ("-changed" if git("status", "--porcelain") else "")
    except FileNotFoundError:
        return ""


def provenance(commit: str, **facts: str) -> dict[str, str]:
    """What stands first in every result."""
    return {
        **facts,
        "torch": torch.__version__,
        "commit": commit or "unknown",
        "date": date.today().isoformat(),
    }


def add_gpu_options(parser: argparse.ArgumentParser, files: str) -> None:
    """--out and --commit. files: what the script leaves in --out."""
    parser.add_argument("--out", type=Path, help=f"folder for {files}")
    parser.add_argument("--commit", default="", help="of this code, where it is no git checkout")


def require_gpu(parser: argparse.ArgumentParser) -> None:
    if not torch.cuda.is_available():
        parser.error("there is no NVIDIA GPU to measure, or torch is a CPU build")


def gpu_provenance(commit: str, *sources: str) -> dict[str, str]:
    """What stands first in a result of this GPU. sources: what the figures depend on."""
    return provenance(
        commit or commit_of(*sources),
        machine=torch.cuda.get_device_name(),
        cuda=torch.version.cuda,
    )


def write_result(path: Path, result: dict, indent: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=indent) + "\n", encoding="utf-8")


def run_on_cpu(
    document: str,
    result: Path,
    measure: Callable[[], dict],
    show: Callable[[dict, Console], None],
    sources: tuple[str, ...],
) -> None:
    """Measures and shows; with --save, writes ``result`` too.

    document: the script's docstring. sources: what the figures depend on, for their commit.
    """
    parser = argparse.ArgumentParser(description=document.splitlines()[0])
    parser.add_argument("--save", action="store_true", help=f"write {result.relative_to(ROOT)}")
    save = parser.parse_args().save
    results = measure()
    show(results, Console())
    if save:
        machine = f"{platform.machine()} CPU, {platform.system()}"
        origin = provenance(commit_of(*sources), machine=machine)
        write_result(result, {**origin, **results}, indent=2)
