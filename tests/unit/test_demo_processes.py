"""What the demo starts ends with it, and stopping it shows no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sageattention3.demo import frontend
from sageattention3.demo.pack import ROOT

# The demo's server without ComfyUI: a process that sleeps, and one that waits for it.
OWNER = """
import importlib.util, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("loader", sys.argv[1])
loader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loader)
loader.load_pack()
from sageattention3.demo import server

server.host.require = lambda: None
class Sleeper(server.Server):
    def _command(self):
        return [sys.executable, "-c", "import time; time.sleep(60)"]
    def _wait_until_ready(self):
        print(self._process.pid, flush=True)
with Sleeper(Path(sys.argv[2])):
    time.sleep(60)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels leave the children alone")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_when_the_demo_is_killed(tmp_path, how):
    command = [sys.executable, "-c", OWNER, str(ROOT / "demo" / "pack.py"), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        assert alive(pid)
        owner.send_signal(how)
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = alive(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_stopping_the_demo_shows_no_traceback(tmp_path):
    """Ctrl-C reaches install.py and its child; install.py has the words for it."""
    script = (
        "import runpy, sys\n"
        "sys.argv = ['demo', 'demo']\n"
        f"sys.path.insert(0, {str(ROOT / 'demo')!r})\n"
        "import builtins, importlib\n"
        "real = importlib.import_module\n"
        "def stopped(name, package=None):\n"
        "    module = real(name, package)\n"
        "    if name.endswith('demo.host'):\n"
        "        def prepare():\n"
        "            raise KeyboardInterrupt\n"
        "        module.prepare = prepare\n"
        "    return module\n"
        "importlib.import_module = stopped\n"
        f"runpy.run_path({str(ROOT / 'demo' / '__main__.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_a_python_that_does_not_look_beside_its_script_runs_the_tools(tmp_path):
    """ComfyUI's portable build for Windows has such a Python."""
    command = [sys.executable, "-I", ROOT / "demo" / "__main__.py", "build", "--arch", "sm_75"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "7.5 is not supported" in done.stderr


def test_a_missing_browser_driver_is_named_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(frontend, "MODULES", tmp_path)
    with pytest.raises(frontend.FrontendError, match=r"run `python install\.py test` once"):
        frontend.tour("http://127.0.0.1:1", [])


def test_tests_on_another_host_name_a_folder_that_is_none(tmp_path):
    command = [sys.executable, ROOT / "tests" / "on_host.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        f"{tmp_path} is no ComfyUI: it has no main.py\n",
    )


def test_the_demos_nodes_need_nothing_beside_their_folder():
    """The host loads them as a pack of their own, from a link to that folder alone."""
    modules = ["host", "families", "widths", "tiny", "nodes", "pack"]
    for name in modules:
        text = (ROOT / "demo" / f"{name}.py").read_text("utf-8")
        above = [line for line in text.splitlines() if line.startswith("from ..")]
        assert above == [], name
