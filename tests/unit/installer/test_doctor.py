"""The doctor's report: whole, on one screen, safe to paste, also when everything is broken."""

import getpass
import json
import subprocess
import sys
from pathlib import Path

import pytest
from sageattention3.demo.pack import ROOT
from sageattention3.installer import doctor, probe
from sageattention3.installer.advice import advise
from sageattention3.installer.privacy import clean

from .machines import machine

KEYS = [
    *("pack", "python", "comfyui", "packages", "missing", "torch", "nvidia", "nvrtc", "cache"),
    *("backends", "other_attention", "advice"),
]


def run_doctor(*options, python=(sys.executable,), **environment):
    command = [*python, ROOT / "install.py", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, **environment)


@pytest.fixture(scope="module")
def report():
    done = run_doctor("--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_report_has_every_part_and_no_error_where_nothing_is_broken(report):
    assert list(report) == KEYS
    assert [key for key in KEYS if "error" in report[key]] == []


def test_the_report_names_every_backend_and_says_why_those_that_cannot_cannot(report):
    from sageattention3.kernels.backends import BACKENDS

    sampling = [backend for backend in BACKENDS if backend.forward is not None]
    expected = {(p, backend.name) for backend in sampling for p in backend.precisions}
    assert {(row["precision"], row["backend"]) for row in report["backends"]} == expected
    assert all(row["usable"] != bool(row["reason"]) for row in report["backends"])


def test_the_report_holds_neither_a_user_name_in_a_path_nor_a_path_outside(report):
    text = json.dumps(report)
    assert str(Path.home()) + "/" not in text
    assert str(ROOT) not in text
    assert sys.prefix not in text


def test_no_torch_is_told_in_words_and_by_the_exit_status(tmp_path):
    """-S leaves out site-packages: a Python that is not ComfyUI's."""
    done = run_doctor(python=(sys._base_executable, "-S"), cwd=tmp_path)
    assert done.returncode == 1
    assert "This Python has no torch" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_python_that_does_not_look_beside_its_script_is_enough():
    """The one of the portable build for Windows is such."""
    done = run_doctor("--json", python=(sys.executable, "-I"))
    assert json.loads(done.stdout)["pack"]["nodes"]


def test_a_console_that_knows_few_letters_is_no_trouble(tmp_path, monkeypatch):
    """QA-38: as on Windows with an old code page."""
    (tmp_path / "custom_nodes").mkdir()
    (tmp_path / "start-测试.sh").write_text("python main.py --use-sage-attention\n", "utf-8")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run_doctor("--comfyui", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--use-sage-attention in start-??.sh" in done.stdout


def test_a_torch_that_ends_its_process_does_not_end_the_report(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = doctor.examine()
    assert report["torch"]["error"].startswith("exit status -6")
    assert report["advice"][0]["code"] == "torch-broken"
    assert doctor.exit_status(report) == 1


def test_facts_found_before_a_crash_are_kept(monkeypatch, tmp_path):
    """What is asked later, kernels for one, may die; torch's version is known by then."""
    file = tmp_path / "facts.json"
    monkeypatch.setattr(probe, "find_nvrtc", lambda: (_ for _ in ()).throw(SystemExit(3)))
    probe.probe(probe.KERNELS, file)
    facts = json.loads(file.read_text())
    assert facts["torch"]["version"]
    assert facts["nvrtc"] == {"error": "SystemExit: 3"}
    assert facts["backends"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"torch": {"error": "ModuleNotFoundError: No module named 'torch'"}},
        {"backends": {"error": "not reached"}, "nvrtc": {"error": "NvrtcError: none"}},
        {"comfyui": {"found": False}, "cache": {"error": "OSError: x"}, "missing": ["ninja"]},
    ],
)
def test_the_screen_is_one_screen(changes, capsys):
    report = machine(**changes)
    report["advice"] = [row._asdict() for row in advise(report)]
    doctor.print_screen(report)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


HOME = str(Path.home())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ROOT}/kernels/cuda/x.cu is missing", "<pack>/kernels/cuda/x.cu is missing"),
        (f"{sys.prefix}/lib/libnvrtc.so", "<Python>/lib/libnvrtc.so"),
        (
            "NVRTC 12.4 (/usr/lib/libnvrtc.so.12) is old",
            "NVRTC 12.4 (<elsewhere>/libnvrtc.so.12) is old",
        ),
        (r"C:\Users\John Doe\cuda\nvrtc.dll: no", "<elsewhere>/nvrtc.dll: no"),
        (r"\\server\share\John\x.dll", "<elsewhere>/x.dll"),
        ("/home/jane/a b/c.so", "<elsewhere>/c.so"),
        ("/data/ComfyUI/custom_nodes/x", "<ComfyUI>/custom_nodes/x"),
        ("int8/fp4 at 3/4 of 10 GiB/s; see https://x.org/a/b", None),
        ("attention of 1/2 is 8.0 to 12.1", None),
    ],
)
def test_paths_are_named_by_what_they_are_and_other_text_is_left(text, expected):
    cleaned = clean({"a": [text]}, Path("/data/ComfyUI"))
    assert cleaned == {"a": [expected or text]}


def test_the_users_name_leaves_no_path_that_is_known(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    assert clean("<ComfyUI>/users/jane/x and jane") == "<ComfyUI>/users/<user>/x and jane"
