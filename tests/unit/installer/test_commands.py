"""install.py's command line."""

import importlib.util
import subprocess
import sys

import pytest
from sageattention3.demo.pack import ROOT


@pytest.fixture
def install(monkeypatch):
    """A fresh install.py."""
    spec = importlib.util.spec_from_file_location("pack_install", ROOT / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.startswith("sageattention3_installer")]:
        del sys.modules[name]


@pytest.fixture
def ran(install, monkeypatch):
    """What was run, in order."""
    ran = []
    monkeypatch.setattr(install.into_comfyui, "install", lambda chosen: ran.append(chosen) or 0)
    monkeypatch.setattr(install.environment, "make_environment", lambda: ran.append("environment"))
    monkeypatch.setattr(install, "run_tool", lambda _python, *words: ran.append(words) or 0)
    return ran


@pytest.mark.parametrize(
    "arguments", [["demo", "--fast"], ["--no-browser"], ["install", "-x"], ["uninstall", "all"]]
)
def test_options_that_nobody_reads_are_refused(install, ran, arguments):
    """``--no-browser`` alone would install into the Python that runs it, which nobody meant."""
    with pytest.raises(SystemExit):
        install.main(arguments)
    assert ran == []


@pytest.mark.parametrize("arguments", [[], ["install"]])
def test_no_command_installs(install, ran, arguments):
    assert install.main(arguments) == 0
    assert ran == [None]


def test_a_comfyui_may_be_named_with_and_without_the_command(install, ran, tmp_path):
    install.main(["--comfyui", str(tmp_path)])
    install.main(["install", "--comfyui", str(tmp_path)])
    assert ran == [tmp_path, tmp_path]


@pytest.mark.parametrize("has_torch", [True, False])
def test_build_uses_the_running_python_only_if_that_has_a_torch(
    install, ran, monkeypatch, has_torch
):
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: has_torch or None)
    assert install.main(["build", "--arch", "sm_89"]) == 0
    expected = [("build", "--arch", "sm_89")]
    assert ran == (expected if has_torch else ["environment", *expected])


@pytest.mark.parametrize(
    ("error", "status", "words"), [("setup", 1, "what to do"), ("stop", 130, "to go on")]
)
def test_errors_and_interrupts_end_in_words(install, monkeypatch, capsys, error, status, words):
    errors = {"setup": install.SetupError("what to do"), "stop": KeyboardInterrupt()}

    def fail(_chosen):
        raise errors[error]

    monkeypatch.setattr(install.into_comfyui, "install", fail)
    assert install.main([]) == status
    assert words in capsys.readouterr().err


def test_an_old_python_is_refused_in_words_before_it_reads_what_it_cannot(tmp_path):
    """Old syntax alone, up to the check: a newer one would end in a SyntaxError there."""
    program = (
        "import sys\nsys.version_info = (3, 9, 18)\nimport runpy\n"
        f"runpy.run_path({str(ROOT / 'install.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs Python 3.10 or newer" in done.stderr
    assert "Traceback" not in done.stderr
