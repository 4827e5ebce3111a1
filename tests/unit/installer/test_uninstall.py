"""install.py uninstall takes away built kernels and nothing else."""

import subprocess
import sys

import pytest
from sageattention3.demo.pack import ROOT
from sageattention3.installer import jit, uninstall
from sageattention3.installer.screen import SetupError

KEY = "0123456789abcdef" * 2 + "01234567"


def test_built_kernels_and_an_empty_folder_go_and_packages_stay(tmp_path, monkeypatch):
    """In a process of its own: that is how it runs, without torch."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for name in (f"{KEY}.cubin", f"{KEY}.lock", "01234567abc_d.tmp"):
        (folder / name).write_bytes(b"x" * 100)
    monkeypatch.setenv("SAGEATTENTION3_CACHE", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, ROOT / "install.py", "uninstall"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 built kernels removed" in done.stdout
    assert list(tmp_path.iterdir()) == []
    done = subprocess.run(command, capture_output=True, text=True)
    assert "0 built kernels removed" in done.stdout, "a second time there is nothing to do"


def test_without_the_packages_that_name_the_folder_it_says_which_python_to_take(monkeypatch):
    def fail(module):
        raise ImportError("No module named 'platformdirs'", name="platformdirs")

    monkeypatch.setattr(jit, "load", fail)
    with pytest.raises(SetupError, match=r"platformdirs.*ComfyUI's Python"):
        uninstall.uninstall()
