"""Builds: in parallel, twice at once, killed, crashed, from awkward folders."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from sageattention3.kernels.jit import build as build_module
from sageattention3.kernels.jit import cache, compile
from sageattention3.kernels.jit.build import BuildError, build, job_count

GIB = 1 << 30
JIT = Path(build_module.__file__).parent

# Runs build() in a process of its own, without torch and the rest of the pack.
BUILDER = """
import importlib.util, json, sys
from pathlib import Path
jit, kernels, steps = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
spec = importlib.util.spec_from_file_location(
    "jit", jit / "__init__.py", submodule_search_locations=[str(jit)])
sys.modules["jit"] = importlib.util.module_from_spec(spec)
from jit import build, compile, variants
compile.CUDA_FOLDER = kernels
wanted = [(variants.Variant(source="saxpy.cu", kernel="saxpy", params="QQQf", threads=128,
                            template=(step, False)), 90) for step in steps]
print(json.dumps([built.entry.record for built in build.build(wanted)]))
"""


def start_builder(*steps: int, jit: Path = JIT, kernels: Path | None = None, **options):
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, jit, kernels or compile.CUDA_FOLDER, json.dumps(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def answer(process) -> list[dict]:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors.decode()
    return json.loads(output)


def test_build_answers_every_request_and_fills_the_cache(saxpy):
    variants = [saxpy(1), saxpy(2)]
    wanted = [(variant, sm) for variant in variants for sm in (80, 120)]
    states = []
    built = build(wanted, states.append)
    assert [(b.variant, b.sm) for b in built] == wanted
    assert len({b.entry.cubin for b in built}) == 4
    assert [state.done for state in states] == [0, 1, 2, 3, 4]
    assert {state.latest for state in states[1:]} == {
        f"saxpy<{steps}, false> for {arch}"
        for steps in (1, 2)
        for arch in ("sm_80", built[1].entry.record["arch"])
    }


def test_second_build_starts_no_compiler(saxpy, monkeypatch):
    first = build([(saxpy(), 90)])
    monkeypatch.setattr(build_module, "_run_ninja", None)
    assert build([(saxpy(), 90)])[0].entry == first[0].entry


def test_one_failing_kernel_stops_no_other(saxpy, cache_folder, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "1")
    broken = saxpy(source="broken.cu", kernel="broken", template=(), params="Q")
    with pytest.raises(BuildError) as error:
        build([(saxpy(1), 90), (broken, 90), (saxpy(2), 90), (saxpy(3), 90)])
    assert list(error.value.failures) == ["broken for sm_90a"]
    assert len(list(cache_folder.glob("*.cubin"))) == 3


def test_truncated_entry_is_built_again(saxpy, cache_folder):
    """QA-36: a half-written binary of an earlier start killed the process at the first launch."""
    (built,) = build([(saxpy(), 90)])
    (path,) = cache_folder.glob("*.cubin")
    path.write_bytes(path.read_bytes()[:1000])
    (again,) = build([(saxpy(), 90)])
    assert again.entry.cubin == built.entry.cubin
    assert again.entry.record["seconds"] > 0


def test_two_processes_building_the_same_compile_each_kernel_once(tmp_path, monkeypatch):
    jit, calls = tmp_path / "jit", tmp_path / "calls"
    _copy(JIT, jit)
    with open(jit / "compile.py", "a") as file:
        file.write(
            "\n_compile = compile_job\n"
            "def compile_job(job):\n"
            f"    with open({str(calls)!r}, 'a') as file:\n"
            "        file.write(job.expression + chr(10))\n"
            "    time.sleep(0.5)\n"
            "    return _compile(job)\n"
        )
    monkeypatch.setenv("MAX_JOBS", "2")
    builders = [start_builder(1, 2, jit=jit) for _ in range(2)]
    first, second = map(answer, builders)
    assert first == second
    assert sorted(calls.read_text().split("\n")) == ["", "saxpy<1, false>", "saxpy<2, false>"]


def test_killed_builder_leaves_neither_a_lock_nor_a_broken_entry(saxpy, cache_folder):
    builder = start_builder(*range(1, 30), start_new_session=True)
    deadline = time.monotonic() + 30
    while not list(cache_folder.glob("*.lock")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.communicate()
    assert list(cache_folder.glob("*.lock")), "the builder was killed too early"
    started = time.monotonic()
    build([(saxpy(steps), 90) for steps in (1, 2, 3, 4)])
    assert time.monotonic() - started < 30


def test_lock_of_a_killed_holder_is_free(cache_folder):
    folder = cache.writable_folder()
    script = f"""
import filelock, time
lock = filelock.FileLock({str(folder / "key.lock")!r})
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    entered = threading.Event()

    def wait():
        with cache.building(folder, "key"):
            entered.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not entered.wait(0.5), "the lock did not hold while its holder lived"
    holder.kill()
    holder.communicate()
    assert entered.wait(10)
    waiter.join()


@pytest.mark.skipif(os.name != "posix", reason="files cannot be limited here")
@pytest.mark.parametrize("most", [100, 5000], ids=["at the start", "while kernels are kept"])
def test_a_disk_that_is_full_is_said_in_words_and_leaves_nothing_broken(cache_folder, most):
    import resource

    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    builder = start_builder(1, 2, preexec_fn=limit_files)
    _, errors = builder.communicate(timeout=60)
    last = errors.decode().strip().splitlines()[-1]
    assert builder.returncode
    assert last.startswith(("jit.errors.JitError", "jit.build.BuildError", "saxpy<"))
    assert "File too large" in last
    assert all(cache.unseal(path.read_bytes()) for path in cache_folder.glob("*.cubin"))
    assert list(cache_folder.glob("*.tmp")) == []
    assert len(answer(start_builder(1, 2))) == 2, "with room again it builds"


def test_crashing_compiler_is_an_error_not_a_crash(saxpy, tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setattr(build_module, "_CHILD", child)
    with pytest.raises(BuildError, match="the compiler died without an answer"):
        build([(saxpy(), 90)])


@pytest.mark.parametrize("name", ["with space", "ünï-测试", "quote'd $dollar & more", "d" * 200])
def test_pack_cache_and_temporary_files_may_lie_in_awkward_folders(name, tmp_path, monkeypatch):
    """QA-38: spaces and letters beyond ASCII broke compilers' command lines."""
    root = tmp_path / name
    jit, kernels = root / "pack" / "jit", root / "pack" / "cuda"
    _copy(JIT, jit)
    _copy(compile.CUDA_FOLDER, kernels)
    (root / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(root / "tmp"))
    monkeypatch.setenv(cache.VARIABLE, str(root / "cache"))
    (record,) = answer(start_builder(3, jit=jit, kernels=kernels))
    assert record["arch"] == "sm_90a"
    assert len(list((root / "cache").glob("*.cubin"))) == 1


def test_pack_folder_may_be_read_only(tmp_path):
    """QA-38: a shared installation that its users may not write to."""
    jit, kernels = tmp_path / "pack" / "jit", tmp_path / "pack" / "cuda"
    _copy(JIT, jit)
    _copy(compile.CUDA_FOLDER, kernels)
    before = _tree(tmp_path / "pack")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    assert answer(start_builder(3, jit=jit, kernels=kernels, env=environment))
    assert _tree(tmp_path / "pack") == before


def test_environment_without_home_path_and_locale_still_builds(tmp_path):
    """QA-38: services start without HOME."""
    environment = {cache.VARIABLE: str(tmp_path / "cache"), "LC_ALL": "C", "PATH": "/nonexistent"}
    assert answer(start_builder(3, env=environment))


def test_foreign_toolchains_are_nobodys_business(tmp_path):
    """QA-35: an nvcc older than torch, a CUDA_HOME without CUDA, compilers that fail, no ninja."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("nvcc", "gcc", "cc", "cl", "ninja"):
        (tools / name).write_text("#!/bin/sh\necho release 11.8\nexit 1\n")
        (tools / name).chmod(0o755)
    environment = {
        cache.VARIABLE: str(tmp_path / "cache"),
        "PATH": str(tools),
        "CUDA_HOME": str(tmp_path),
        "CUDA_PATH": str(tmp_path),
        "CC": str(tools / "cc"),
    }
    (record,) = answer(start_builder(3, env=environment))
    assert record["nvrtc"] != [11, 8]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second file system here")
def test_temporary_files_may_lie_on_another_file_system(tmp_path, monkeypatch):
    """QA-38: a rename does not reach across."""
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    assert answer(start_builder(3))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="it has no PYTHONSAFEPATH")
def test_a_python_that_does_not_look_beside_its_script_keeps_its_first_folder(
    saxpy, tmp_path, monkeypatch
):
    """ComfyUI's portable build for Windows has such a Python; what stands first is not ours."""
    (tmp_path / "filelock.py").write_text(
        "import pathlib\n"
        "class FileLock:\n"
        "    def __init__(self, *_, **__): pass\n"
        "    def acquire(self): pathlib.Path(__file__).with_name('used').touch()\n"
        "    def release(self): pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert build([(saxpy(), 90)])
    assert (tmp_path / "used").exists()


@pytest.mark.parametrize(
    ("cpus", "free_gib", "max_jobs", "expected"),
    [
        (32, 8, None, 12),
        (32, 4, None, 4),
        (4, 64, None, 4),
        (16, 2, None, 1),
        (16, 0, None, 1),
        (1, 64, None, 1),
        (32, 8, "2", 2),
        (2, 1, "24", 24),
        (4, 64, "many", 4),
        (4, 64, "0", 4),
    ],
)
def test_job_count_is_what_the_user_says_else_what_the_machine_bears(
    cpus, free_gib, max_jobs, expected
):
    """QA-39: one compiler per core took all memory of small machines."""
    assert job_count(cpus, free_gib * GIB, max_jobs) == expected


@pytest.mark.parametrize(("limit", "free_gib"), [(f"{6 * GIB}", 5), ("max", 100), (None, 100)])
def test_a_containers_limit_counts_as_its_memory(tmp_path, monkeypatch, limit, free_gib):
    """QA-39: rented machines show the whole host's memory and kill who uses more than a share."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB))
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{GIB}\n")
    assert build_module.free_memory(tmp_path) == free_gib * GIB


def test_slow_build_reports_that_it_lives(saxpy, tmp_path, monkeypatch):
    """QA-39: a start that says nothing for minutes looks frozen."""
    child = tmp_path / "child.py"
    child.write_text("import time\ntime.sleep(1)\n")
    monkeypatch.setattr(build_module, "_CHILD", child)
    monkeypatch.setattr(build_module, "HEARTBEAT_SECONDS", 0.2)
    states = []
    with pytest.raises(BuildError):
        build([(saxpy(), 90)], states.append)
    beats = [state.seconds for state in states if state.done == 0]
    assert len(beats) >= 4
    assert beats == sorted(beats)


def test_interrupted_build_leaves_no_compiler_running(saxpy, tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    note = tmp_path / "pid"
    child.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(build_module, "_CHILD", child)
    monkeypatch.setattr(build_module, "HEARTBEAT_SECONDS", 0.2)

    def interrupt(state):
        if note.exists() and note.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([(saxpy(), 90)], interrupt)
    assert _ends(int(note.read_text()))


def _ends(pid: int) -> bool:
    """Whether process ``pid`` ends within seconds; one that nobody reaped has ended too."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def _copy(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())


def _tree(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*")}
