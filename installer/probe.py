"""Facts that need torch, the driver or the kernels, found in a process of their own.

A torch that does not fit its driver may take its process along, and must not take a report of what
is broken along with it.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from . import jit
from .place import ROOT

TORCH, KERNELS = "torch", "kernels"


def ask(what: str, python: Path | str = sys.executable) -> dict:
    """What ``probe`` finds with ``python``; what it found until then if its process dies.

    what: TORCH for torch and its GPUs; KERNELS for NVRTC, the cache and every backend too, which
    builds and proves what is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "facts.json")
        command = [python, ROOT / "install.py", "probe", what, file]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        facts = json.loads(file.read_text("utf-8")) if file.exists() else {}
    if done.returncode:
        facts["died"] = f"exit status {done.returncode}; {done.stderr.strip()[-300:]}"
    return facts


def probe(what: str, file: Path) -> None:
    """Write the facts to ``file`` as JSON, one by one. Each may be ``{"error": words}``."""
    facts = {}

    def keep(name, find, *arguments):
        try:
            facts[name] = find(*arguments)
        except BaseException as error:  # whatever it is, the other facts are wanted
            facts[name] = {"error": _words(error)}
        file.write_text(json.dumps(facts), encoding="utf-8")
        return "error" not in facts[name]

    has_torch = keep("torch", find_torch)
    if what == KERNELS:
        keep("nvrtc", find_nvrtc)
        keep("cache", find_cache)
        if has_torch and keep("pack", load_pack):
            keep("backends", find_backends, [gpu["device"] for gpu in facts["torch"]["gpus"]])


def find_torch() -> dict:
    """Its version, the CUDA or ROCm that it was made for, the GPUs it sees, or why it sees none."""
    import torch

    found = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "gpus": [],
        "no_gpu": None,
    }
    if not torch.version.cuda:
        return found
    try:
        torch.cuda.init()
    except Exception as error:  # torch's words tell an old driver from none
        found["no_gpu"] = _words(error)
        return found
    for index in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(index)
        found["gpus"].append(
            {
                "device": f"cuda:{index}",
                "name": of.name,
                "capability": f"{of.major}.{of.minor}",
                "gib": round(of.total_memory / (1 << 30), 1),
            }
        )
    return found


def find_nvrtc() -> dict:
    """Its version, and whether it is that of a package of this Python or the system's."""
    found = jit.load("nvrtc").find_nvrtc()
    of_package = "site-packages" in Path(found.library).parts
    return {"version": ".".join(map(str, found.version)), "of_package": of_package}


def find_cache() -> dict:
    entries = jit.load("cache").entries()
    size = sum(path.stat().st_size for path in entries)
    return {"kernels": len(entries), "mib": round(size / (1 << 20), 1)}


def load_pack() -> dict:
    path = ROOT / "demo" / "pack.py"
    spec = importlib.util.spec_from_file_location("sageattention3_loader", path)
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    return {"nodes": sorted(loader.load_pack().NODE_CLASS_MAPPINGS)}


def find_backends(devices: list[str]) -> list[dict]:
    """Every backend on each device, for an everyday call; builds and proves what that needs."""
    from sageattention3.kernels import capabilities

    return [
        {"device": device, **row._asdict()}
        for device in devices or ["cpu"]
        for row in capabilities(device)
    ]


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip(": ")
