"""What can be told of the machine without torch."""

import csv
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path


def describe_python() -> dict:
    return {
        "version": platform.python_version(),
        "kind": _kind(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def nvidia_gpus() -> list[dict]:
    """Name and driver of each GPU, as NVIDIA's own tool sees them; empty where there is none."""
    # The driver puts it on the path on Linux, and here on Windows.
    tool = shutil.which("nvidia-smi") or r"C:\Windows\System32\nvidia-smi.exe"
    command = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [{"name": row[0], "driver": row[1]} for row in rows if len(row) == 2]


def _kind() -> str:
    if list(Path(sys.executable).parent.glob("python*._pth")):
        return "embedded"
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        return "conda"
    return "venv" if sys.prefix != sys.base_prefix else "system"
