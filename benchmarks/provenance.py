"""Which state of the code a figure belongs to."""

import subprocess
from pathlib import Path

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
