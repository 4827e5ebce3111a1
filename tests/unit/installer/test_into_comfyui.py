"""install.py within a ComfyUI: what it installs, where, and that it harms nothing."""

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sageattention3.demo.pack import ROOT
from sageattention3.installer import comfyui as comfyui_module
from sageattention3.installer import doctor, into_comfyui, packages, place, probe
from sageattention3.installer.screen import SetupError

from .machines import machine

NAMES = [packages.name_of(line) for line in packages.read_requirements()]
BUILD = ["build", "--brief"]


class ComfyUI:
    """The Python of a ComfyUI: what it has, what was run in it, and how that ended."""

    def __init__(self):
        self.cuda = "13.0"
        self.gpus = machine()["torch"]["gpus"]
        self.installed = dict.fromkeys(NAMES, "1.0") | {"cuda-bindings": "13.1.1"}
        self.wanted = []  # what pip was asked for
        self.tools = []
        self.pip_log = ""  # what it says if it fails
        self.build_status = 0

    def version(self, name):
        if name not in self.installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.installed[name]

    def add(self, requirements):
        self.wanted += requirements
        if self.pip_log:
            return self.pip_log
        for line in requirements:
            self.installed[packages.name_of(line)] = re.findall(r"[\d.]+", line + ">=1.0")[0]
        return None

    def run_tool(self, python, *arguments):
        self.tools.append([*arguments])
        return self.build_status

    def ask(self, what):
        return {"torch": {**machine()["torch"], "cuda": self.cuda, "gpus": self.gpus}}


@pytest.fixture
def comfyui(monkeypatch):
    comfyui = ComfyUI()
    monkeypatch.setattr(importlib.metadata, "version", comfyui.version)
    monkeypatch.setattr(packages, "add", comfyui.add)
    monkeypatch.setattr(probe, "ask", comfyui.ask)
    monkeypatch.setattr(into_comfyui, "run_tool", comfyui.run_tool)
    monkeypatch.setattr(doctor, "examine", lambda root: machine(advice=[]))
    return comfyui


def test_only_what_is_missing_is_installed_and_the_kernels_are_built(comfyui):
    del comfyui.installed["matplotlib"]
    assert into_comfyui.install() == 0
    assert comfyui.wanted == ["matplotlib"]
    assert comfyui.tools == [BUILD]


@pytest.mark.parametrize(
    ("cuda", "bindings", "wanted"),
    [
        ("12.8", "12.9.4", None),
        ("12.8", "12.6.2", "cuda-bindings>=12.9,<13"),
        ("12.8", "13.1.1", "cuda-bindings>=12.9,<13"),
        ("13.0", "12.9.4", "cuda-bindings>=13,<14"),
        ("12.8", None, "cuda-bindings>=12.9,<13"),
        ("", None, None),
    ],
)
def test_the_cuda_bindings_have_the_major_version_of_torchs_cuda(comfyui, cuda, bindings, wanted):
    """Others would look for an NVRTC that torch did not bring."""
    comfyui.cuda = cuda
    comfyui.installed["cuda-bindings"] = bindings
    if bindings is None:
        del comfyui.installed["cuda-bindings"]
    into_comfyui.install()
    assert comfyui.wanted == ([wanted] if wanted else [])


def test_a_pack_that_can_serve_with_less_is_no_failed_installation(comfyui, capsys):
    comfyui.build_status = 1
    assert into_comfyui.install() == 0
    assert "the first run tries again" in capsys.readouterr().out
    comfyui.pip_log = "  ERROR: Could not find a version that satisfies matplotlib"
    del comfyui.installed["matplotlib"]
    assert into_comfyui.install() == 0
    out = capsys.readouterr().out
    assert "Could not find a version" in out
    assert "Is this machine online?" in out
    assert len(comfyui.tools) == 2, "the picture's package is not needed to build"


def test_without_a_package_of_the_build_nothing_is_built(comfyui):
    comfyui.pip_log = "  no network"
    del comfyui.installed["ninja"]
    assert into_comfyui.install() == 0
    assert comfyui.tools == []


@pytest.mark.parametrize("cuda", ["", "13.0"])
def test_without_a_gpu_nothing_is_built(comfyui, cuda):
    comfyui.cuda, comfyui.gpus = cuda, []
    assert into_comfyui.install() == 0
    assert comfyui.tools == []


def test_nodes_that_cannot_load_are_a_failed_installation(comfyui, monkeypatch, capsys):
    problem = {"level": "problem", "code": "comfyui-old", "text": "Update it."}
    monkeypatch.setattr(doctor, "examine", lambda root: machine(advice=[problem]))
    assert into_comfyui.install() == 1
    assert "Done" not in capsys.readouterr().out


# --- which ComfyUI, and its Python ----------------------------------------------------------------


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """The pack's folder, outside of any ComfyUI."""
    folder = tmp_path / "downloads" / "sage"
    folder.mkdir(parents=True)
    for module in (place, comfyui_module, into_comfyui):
        monkeypatch.setattr(module, "ROOT", folder)
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    return folder


@pytest.fixture
def root(tmp_path):
    """A ComfyUI with a Python of its own that has torch."""
    root = tmp_path / "Comfy UI ünï"
    (root / "custom_nodes").mkdir(parents=True)
    make_python(root / ".venv", torch=True)
    return root


def make_python(folder: Path, torch: bool) -> Path:
    """A program in ``folder`` that answers whether it has torch, and notes how it is called."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exit {int(not torch)}; fi\n'
        f'printf "%s\\n" "$@" > "{folder}/called"\n'
    )
    python.chmod(0o755)
    return python


def test_a_chosen_comfyui_gets_a_link_and_its_own_python_installs(pack, root, capsys):
    assert into_comfyui.install(root) == 0
    assert (root / "custom_nodes" / "sage").resolve() == pack
    called = (root / ".venv" / "called").read_text().splitlines()
    assert called == [str(pack / "install.py"), "install", "--comfyui", str(root)]
    assert into_comfyui.install(root) == 0, "a second time as well"
    assert [path.name for path in (root / "custom_nodes").iterdir()] == ["sage"]


def test_of_the_portable_build_the_outer_folder_may_be_named_too(pack, root):
    portable = root.parent / "portable"
    portable.mkdir()
    inner = root.rename(portable / "ComfyUI")
    assert comfyui_module.find(portable) == inner


def test_a_pack_within_comfyui_finds_it_also_through_a_link(pack, root, monkeypatch):
    link = root / "custom_nodes" / "any name"
    link.symlink_to(pack)
    monkeypatch.setattr(comfyui_module, "ROOT", link)
    assert comfyui_module.find() == root
    monkeypatch.setattr(comfyui_module, "ROOT", pack)
    assert comfyui_module.find() is None
    monkeypatch.setenv("COMFYUI_PATH", str(root))
    assert comfyui_module.find() == root


def test_a_python_without_torch_is_passed_over(pack, root, monkeypatch):
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    (root / ".venv").rename(root / "venv")
    make_python(root / ".venv", torch=False)
    assert comfyui_module.find_python(root) == root / "venv" / "bin" / "python"


@pytest.mark.parametrize(("variable", "name"), [("VIRTUAL_ENV", "uv"), ("CONDA_PREFIX", "conda")])
def test_an_environment_that_is_active_is_tried(pack, root, tmp_path, monkeypatch, variable, name):
    (root / ".venv").rename(tmp_path / name)
    monkeypatch.setenv(variable, str(tmp_path / name))
    assert comfyui_module.find_python(root) == tmp_path / name / "bin" / "python"


def test_a_folder_that_is_no_comfyui_is_refused_in_words(pack, tmp_path):
    with pytest.raises(SetupError, match="no folder custom_nodes"):
        into_comfyui.install(tmp_path)


def test_no_python_with_torch_is_an_error_that_says_which_to_take(pack, root, monkeypatch):
    monkeypatch.setattr(comfyui_module, "has_torch", lambda python: False)
    with pytest.raises(SetupError, match="the Python that starts ComfyUI"):
        into_comfyui.install(root)


def test_another_pack_of_the_same_folder_name_is_left_alone(pack, root):
    (root / "custom_nodes" / "sage").mkdir()
    with pytest.raises(SetupError, match="remove it"):
        into_comfyui.install(root)
    assert not (root / "custom_nodes" / "sage").is_symlink()


@pytest.mark.parametrize("answer", ["1", "folder", ""])
def test_at_a_terminal_the_person_is_asked(pack, comfyui, tmp_path, root, monkeypatch, answer):
    near = pack.parent / "ComfyUI"
    (near / "custom_nodes").mkdir(parents=True)
    make_python(near / "venv", torch=True)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "nobody")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: f'"{root}"' if answer == "folder" else answer)
    assert into_comfyui.install() == 0
    linked = [place for place in (near, root) if (place / "custom_nodes" / "sage").exists()]
    assert linked == {"1": [near], "folder": [root], "": []}[answer]


# --- packages -------------------------------------------------------------------------------------


@pytest.fixture
def pip(monkeypatch):
    """Takes the place of subprocess.run; keeps the commands and the pins that came with them."""
    calls = []

    def run(command, **_):
        pins = Path(command[command.index("--constraint") + 1]).read_text().splitlines()
        calls.append((command, pins))
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(packages.subprocess, "run", run)
    return calls


def test_whatever_is_installed_is_pinned_while_ours_are_added(pip):
    """QA-35: an installer of packages took a torch for CUDA away and put one for the CPU there."""
    assert packages.add(["cuda-bindings>=12.9,<13", "filelock"]) is None
    [(command, pins)] = pip
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[-2:] == ["cuda-bindings>=12.9,<13", "filelock"]
    assert f"torch=={importlib.metadata.version('torch')}" in pins
    assert f"numpy=={importlib.metadata.version('numpy')}" in pins
    assert not [pin for pin in pins if pin.startswith(("cuda-bindings==", "filelock=="))]


def test_without_pip_uv_installs_into_the_running_python(pip, monkeypatch):
    """ComfyUI Desktop makes its environment with uv, which puts no pip there."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packages.shutil, "which", lambda name: f"/usr/bin/{name}")
    packages.add(["ninja"])
    assert pip[0][0][:5] == ["/usr/bin/uv", "pip", "install", "--python", sys.executable]


def test_without_pip_and_uv_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    assert "no pip" in packages.add(["ninja"])


def test_pips_own_reason_is_shown(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert "no-such-package-anywhere" in packages.add(["no-such-package-anywhere"])


def test_an_old_package_with_an_odd_version_does_not_spoil_the_pins(monkeypatch):
    odd = SimpleNamespace(metadata={"Name": "odd"}, version="2004d-final build")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [odd])
    assert packages._pins(set()) == []


def test_the_pack_never_asks_for_another_torch():
    lines = packages.REQUIREMENTS.read_text("utf-8").splitlines()
    assert not [line for line in lines if "torch" in line]
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    declared = re.search(r"^dependencies = (\[.*?^\])$", project, re.M | re.S).group(1)
    assert ast.literal_eval(declared) == lines
