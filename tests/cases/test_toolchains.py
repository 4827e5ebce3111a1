"""Installing on machines whose tools are missing, old, contradictory or elsewhere (QA-35, QA-38).

install.py runs as a person or ComfyUI-Manager runs it, in a process of its own.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sageattention3.demo.pack import ROOT

# Python imports it by itself: a torch for CUDA with one GPU, as far as install.py looks.
FAKE_CUDA = """
import json, os, sys, types
given = json.loads(os.environ["FAKE_CUDA"])
if {"probe", "build"} & set(sys.orig_argv):  # the processes that look at torch
    import torch
    torch.version.cuda = given["cuda"]
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda *_: tuple(given["capability"])
    def init():
        if given.get("error"):
            raise RuntimeError(given["error"])
    torch.cuda.init = init
    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(
        name="Fake GPU", major=given["capability"][0], minor=given["capability"][1],
        total_memory=8 << 30)
"""


def fake(folder: Path, name: str, says: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\nprintf '{says}'\nexit 1\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def environment(tmp_path):
    """Every toolchain trouble at once; nothing of it is the pack's business."""
    tools = tmp_path / "tools"
    fake(tools, "nvcc", "Cuda compilation tools, release 11.8, V11.8.89")
    for name in ("gcc", "g++", "cl", "cc"):
        fake(tools, name, "caf\\351: unsupported version")  # Latin-1, which is not UTF-8
    fake(tools, "nvidia-smi", "NVIDIA-SMI has failed because it couldn\\047t communicate")
    fake(tools, "pip", "another Python'\\''s pip")
    (tmp_path / "empty").mkdir()
    return {
        "PATH": str(tools),
        "CUDA_HOME": str(tmp_path / "empty"),
        "CUDA_PATH": str(tmp_path / "empty"),
        "CC": str(tools / "gcc"),
        "SAGEATTENTION3_CACHE": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "LC_ALL": "C",
    }


def install(environment, *python, fake_cuda=None, tmp_path=None, command="install"):
    if fake_cuda:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(FAKE_CUDA)
        environment = {
            **environment,
            "PYTHONPATH": str(tmp_path / "site"),
            "FAKE_CUDA": json.dumps(fake_cuda),
        }
    before = installed()
    done = subprocess.run(
        [*(python or (sys.executable,)), ROOT / "install.py", command],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert installed() == before, "no package came, went or changed"
    assert "Traceback" not in done.stdout + done.stderr
    return done


def installed() -> dict[str, str]:
    return {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}


def test_a_torch_without_cuda_installs_whatever_the_tools_are_like(environment):
    """QA-35, QA-38: no home, no locale, an nvcc older than torch, compilers that fail."""
    done = install(environment)
    assert done.returncode == 0, done.stderr
    assert "is built without CUDA" in done.stdout
    assert "all attention stays with ComfyUI" in " ".join(done.stdout.split())
    assert "Done." in done.stdout


@pytest.mark.parametrize(
    ("fake_cuda", "words"),
    [
        ({"cuda": "13.0", "capability": [7, 5]}, "the kernels need 8.0"),
        (
            {
                "cuda": "13.0",
                "capability": [8, 9],
                "error": "The NVIDIA driver on your system is too old (found version 11040).",
            },
            "Update the driver",
        ),
    ],
    ids=["old GPU", "old driver"],
)
def test_a_gpu_that_cannot_be_served_is_no_failed_installation(
    environment, tmp_path, fake_cuda, words
):
    done = install(environment, fake_cuda=fake_cuda, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert words in " ".join(done.stdout.split())


def test_a_python_without_torch_installs_nothing_and_says_which_python_to_take(environment):
    """QA-35: the wrong interpreter. The nodes could not load, so this is a failure."""
    done = install(environment, sys._base_executable, "-S")
    assert done.returncode == 1
    assert "the Python that starts ComfyUI" in done.stderr
    assert "pip" not in done.stdout


def test_an_oddly_named_pack_folder_serves_and_nothing_is_written_into_it(environment, tmp_path):
    """QA-38."""
    folder = tmp_path / "mit Leerzeichen ünï-测试 & more" / "custom_nodes" / "sage"
    folder.mkdir(parents=True)
    for name in ("__init__.py", "install.py", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("installer", "demo", "kernels", "nodes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = subprocess.run(
        [sys.executable, folder / "install.py", "doctor", "--json"],
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    assert report["comfyui"]["found"]
    assert report["pack"]["nodes"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
