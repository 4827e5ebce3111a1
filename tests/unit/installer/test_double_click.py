"""install.sh, run for real, and install.bat, read: which Python they find and what they start."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import pytest
from sageattention3.demo.pack import ROOT

SHELL = shutil.which("sh")
pytestmark = pytest.mark.skipif(SHELL is None, reason="no POSIX shell here")


@pytest.fixture
def pack(tmp_path):
    """The pack within a ComfyUI; its install.py says how it was started."""
    pack = tmp_path / "Comfy UI ünï" / "custom_nodes" / "sage"
    pack.mkdir(parents=True)
    shutil.copy(ROOT / "install.sh", pack)
    (pack / "install.py").touch()
    return pack


def make_python(folder: Path, name="python", version_is_new=True, status=0) -> None:
    """A program that answers whether its version is new enough, and says how it is called."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exit {int(not version_is_new)}; fi\n'
        f'printf \'%s\\n\' "$0" "$@"\nexit {status}\n'
    )
    (folder / name).chmod(0o755)


def run(pack, *arguments, path="", cwd=None, **variables):
    dirname = str(Path(shutil.which("dirname")).parent)
    (pack / "bin").mkdir(exist_ok=True)
    if not (pack / "bin" / "dirname").exists():
        (pack / "bin" / "dirname").symlink_to(f"{dirname}/dirname")
    return subprocess.run(
        [SHELL, str(pack / "install.sh"), *arguments],
        env={"PATH": f"{path}:{pack / 'bin'}", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
    )


@pytest.mark.parametrize("place", ["../../.venv", "../../venv", "../../../.venv", "../../../venv"])
def test_the_python_beside_comfyui_is_found_from_any_folder(pack, place, tmp_path):
    make_python(pack / place / "bin")
    started, *called = run(pack, cwd=tmp_path).stdout.splitlines()
    assert os.path.samefile(started, pack / place / "bin" / "python")
    assert called == [str(pack / "install.py")]


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_active_environment_is_found(pack, tmp_path, variable):
    make_python(tmp_path / "env" / "bin")
    done = run(pack, **{variable: str(tmp_path / "env")})
    assert done.stdout.splitlines()[0] == str(tmp_path / "env" / "bin" / "python")


@pytest.mark.parametrize("name", ["python3", "python"])
def test_else_any_python_of_the_path_that_is_new_enough(pack, tmp_path, name):
    make_python(pack / "../../.venv" / "bin", version_is_new=False)
    make_python(tmp_path / "path", name)
    assert run(pack, path=str(tmp_path / "path")).stdout.splitlines()[0].endswith(f"path/{name}")


def test_a_folder_that_is_given_is_passed_on_and_the_status_comes_back(pack):
    make_python(pack / "../../.venv" / "bin", status=3)
    done = run(pack, "/data/my Comfy UI")
    assert done.stdout.splitlines()[2:] == ["--comfyui", "/data/my Comfy UI"]
    assert done.returncode == 3


def test_no_python_is_said_in_words(pack):
    done = run(pack)
    assert done.returncode == 1
    assert "No Python 3.10 or newer was found" in done.stderr


def test_the_pack_lands_in_a_comfyui_elsewhere(tmp_path):
    """With the real install.py, up to the Python of that ComfyUI."""
    root = tmp_path / "ComfyUI"
    (root / "custom_nodes").mkdir(parents=True)
    make_python(root / "venv" / "bin")
    done = subprocess.run(
        [ROOT / "install.sh", root],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [link] = (root / "custom_nodes").iterdir()
    assert link.resolve() == ROOT.resolve()
    assert done.stdout.splitlines()[-3:] == ["install", "--comfyui", str(root)]


BAT = (ROOT / "install.bat").read_bytes().decode("ascii")


def test_the_windows_file_calls_install_py_once_per_way_and_then_waits():
    lines = [line.strip() for line in BAT.splitlines()]
    calls = [line for line in lines if "install.py" in line and not line.startswith("rem")]
    assert calls == [f'{way} "%~dp0install.py" %WHERE%' for way in ("%%P", "py -3", "python")]
    assert lines[-2:] == [":end", "pause"]
    assert 'set WHERE=--comfyui "%~1"' in BAT


def test_the_windows_file_has_the_line_ends_that_its_labels_need():
    assert BAT.count("\r\n") == BAT.count("\n")
    assert "*.bat text eol=crlf" in (ROOT / ".gitattributes").read_text()


@pytest.mark.parametrize(
    ("layout", "given"),
    [
        ("portable/python_embeded/python.exe", None),
        ("portable/python_embeded/python.exe", "portable"),
        ("portable/python_embeded/python.exe", "portable/ComfyUI"),
        ("portable/ComfyUI/.venv/Scripts/python.exe", None),
        ("portable/ComfyUI/.venv/Scripts/python.exe", "portable/ComfyUI"),
        ("portable/ComfyUI/venv/Scripts/python.exe", None),
        ("portable/ComfyUI/venv/Scripts/python.exe", "portable/ComfyUI"),
    ],
)
def test_the_windows_file_looks_where_comfyuis_pythons_are(tmp_path, layout, given):
    """given: None where the pack lies in ComfyUI, else the folder that is dropped onto the file."""
    (tmp_path / layout).parent.mkdir(parents=True)
    (tmp_path / layout).touch()
    pack = tmp_path / ("elsewhere/sage" if given else "portable/ComfyUI/custom_nodes/sage")
    pack.mkdir(parents=True)
    (tmp_path / "portable/ComfyUI").mkdir(exist_ok=True)
    paths = re.findall(r'^ +"(.+python\.exe)"', BAT, re.M)
    values = {"%~dp0": f"{pack}/", "%~1": str(tmp_path / given) if given else "nowhere"}
    values |= {"%VIRTUAL_ENV%": "nowhere", "%CONDA_PREFIX%": "nowhere"}
    found = []
    for path in paths:
        for name, value in values.items():
            path = path.replace(name, value)
        posix = Path(PureWindowsPath(path).as_posix())
        if posix.exists():
            found.append(posix)
    assert found
    assert os.path.samefile(found[0], tmp_path / layout)
