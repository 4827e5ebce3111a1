"""Builds many variants at once: one ninja graph, one compiling child process per missing cubin."""

import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import ninja
import psutil
from ninja import ninja_syntax

from . import cache
from .compile import Job, describe_job
from .errors import JitError
from .nvrtc import find_nvrtc
from .variants import Variant

HEARTBEAT_SECONDS = 20
_GIB = 1 << 30
_JOB_BYTES = _GIB // 2  # one child peaks at 0.2 GiB on a 300-line attention kernel
_MARGIN_BYTES = 2 * _GIB  # for the host program and the desktop

_CHILD = Path(__file__).resolve().with_name("child.py")


class BuildError(JitError):
    """Some kernels could not be built; ``failures`` maps their names to reasons."""

    def __init__(self, failures: dict[str, str]):
        self.failures = failures
        super().__init__("\n".join(f"{name}: {reason}" for name, reason in failures.items()))


class Progress(NamedTuple):
    """State of a running build; reported at every change and at least every 20 seconds."""

    done: int
    total: int
    seconds: float
    latest: str  # the kernel that was finished last; empty at the start


class Built(NamedTuple):
    variant: Variant
    sm: int
    entry: cache.Entry


def build(
    wanted: Iterable[tuple[Variant, int]],
    progress: Callable[[Progress], None] = lambda state: None,
) -> list[Built]:
    """Make sure that every (variant, compute capability) is in the cache; answer all of them.

    Raises BuildError after everything that can be built has been; another JitError where nothing
    can (no NVRTC, a GPU that it cannot build for, a missing source, no cache folder, a full disk).
    """
    nvrtc = find_nvrtc()
    jobs = [(variant, sm, describe_job(variant, sm, nvrtc)) for variant, sm in wanted]
    missing = {job.key: job for _, _, job in jobs if cache.find(job.key) is None}
    try:
        failures = _run_ninja(list(missing.values()), progress) if missing else {}
    except OSError as error:
        raise JitError(
            f"the build could not keep its files ({error}); is the disk full?"
        ) from error
    entries = {job.key: cache.find(job.key) for _, _, job in jobs if job.key not in failures}
    for key, entry in entries.items():
        if entry is None:
            failures[key] = "it was built, but the cache folder did not keep it"
    if failures:
        names = {job.key: _title(job) for _, _, job in jobs}
        raise BuildError({names[key]: reason for key, reason in failures.items()})
    return [Built(variant, sm, entries[job.key]) for variant, sm, job in jobs]


def job_count(cpus: int, free_bytes: int, max_jobs: str | None) -> int:
    """How many children may run at once: what the user says, else what processors and RAM bear."""
    if max_jobs and max_jobs.strip().isdigit() and int(max_jobs) > 0:
        return int(max_jobs)
    return max(1, min(cpus, (free_bytes - _MARGIN_BYTES) // _JOB_BYTES))


def free_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that may still be used: the machine's, or less where a container's are limited."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no such limit, or another form of it
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def _run_ninja(jobs: list[Job], progress: Callable[[Progress], None]) -> dict[str, str]:
    """Build ``jobs`` into the cache; answer the reasons of those that failed, by key."""
    folder = cache.writable_folder()
    count = job_count(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        free_memory(),
        os.environ.get("MAX_JOBS"),
    )
    with tempfile.TemporaryDirectory(prefix="sageattention3-") as work:
        _write_graph(Path(work), jobs, folder)
        output = _follow(
            [str(Path(ninja.BIN_DIR) / "ninja"), "-C", work, "-j", str(count), "-k", "0"],
            len(jobs),
            progress,
        )
        failures = {job.key: _failure(Path(work), job, output) for job in jobs}
    cache.prune(folder)
    return {key: reason for key, reason in failures.items() if reason}


def _write_graph(work: Path, jobs: list[Job], folder: Path) -> None:
    with open(work / "build.ninja", "w", encoding="utf-8") as file:
        graph = ninja_syntax.Writer(file)
        program, target = _quoted(sys.executable, str(_CHILD)), _quoted(str(folder))
        graph.rule("compile", f"{program} $in $out {target}", description="$title")
        for job in jobs:
            (work / f"{job.key}.job").write_text(job.to_json(), encoding="utf-8")
            title = ninja_syntax.escape(_title(job))
            graph.build(
                f"{job.key}.result", "compile", f"{job.key}.job", variables={"title": title}
            )


def _quoted(*words: str) -> str:
    """``words`` for the shell that ninja starts commands with, in ninja's own quoting."""
    text = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    return ninja_syntax.escape(text)


def _follow(command: list[str], total: int, progress: Callable[[Progress], None]) -> str:
    """Run ninja to its end and report its progress; answer what it printed."""
    environment = {**os.environ, "NINJA_STATUS": "@%f "}
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # exists on Windows only
    )
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read():
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    output, done, latest = [], 0, ""
    try:
        progress(Progress(0, total, 0.0, ""))
        while True:
            try:
                line = lines.get(timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                progress(Progress(done, total, time.monotonic() - started, latest))
                continue
            if line is None:
                return "".join(output)
            text = line.decode(errors="replace")
            output.append(text)
            status, _, title = text.strip().partition(" ")
            if status.startswith("@"):
                done, latest = int(status[1:]), title
                progress(Progress(done, total, time.monotonic() - started, latest))
    finally:
        process.terminate()
        process.wait()


def _failure(work: Path, job: Job, output: str) -> str | None:
    result = work / f"{job.key}.result"
    if not result.exists():
        return f"the compiler died without an answer; ninja said:\n{output}"
    return json.loads(result.read_text(encoding="utf-8"))


def _title(job: Job) -> str:
    return f"{job.expression} for {job.arch}"
