"""Built cubins on disk: one file per content hash, readable by several processes at any moment.

An entry is the cubin as NVRTC made it, followed by a JSON record and a checksum, so that
``nvdisasm`` opens it as it is and a truncated or damaged file is noticed. Entries appear by an
atomic rename and are never changed afterwards.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

import filelock
import platformdirs

from .errors import JitError

log = logging.getLogger("sageattention3")

VARIABLE = "SAGEATTENTION3_CACHE"
_LIFETIME_DAYS = {".cubin": 90, ".tmp": 1, ".lock": 1}
_OUTDATED_DAYS = 7
_DAY = 24 * 3600
_OURS = re.compile(r"[0-9a-f]{40}\.(cubin|lock)|[0-9a-f]{8}\w*\.tmp")
_LOCK_SECONDS = 600

# cubin, record (JSON), length of the record, SHA-256 of all that, format
_LENGTH = struct.Struct("<I")
_FORMAT = b"sage3cb1"


class CacheError(JitError):
    """No folder can hold built kernels; the message says what to do."""


class Entry(NamedTuple):
    """A built kernel and the record of its build."""

    cubin: bytes
    record: dict


def find(key: str) -> Entry | None:
    """The entry under ``key``; None if it is missing, truncated or damaged."""
    for folder in filter(_trusted, _candidates()):
        path = folder / f"{key}.cubin"
        try:
            entry = unseal(path.read_bytes())
            if entry and time.time() - path.stat().st_mtime > _DAY:
                os.utime(path)  # pruning goes by last use
        except OSError:
            continue
        if entry:
            return entry
        log.warning("SageAttention3: %s is damaged and will be built again", path)
    return None


def writable_folder() -> Path:
    """Where new entries go: the user's cache folder, or a private one among temporary files.

    Raises CacheError if neither can be written.
    """
    candidates = _candidates()
    for folder in candidates:
        reason = _objection(folder)
        if reason is None:
            return folder
        log.warning("SageAttention3: cannot keep built kernels in %s: %s", folder, reason)
    tried = ", ".join(map(str, candidates))
    raise CacheError(f"no folder can hold built kernels (tried {tried}); set {VARIABLE} to one")


def publish(folder: Path, key: str, entry: Entry) -> None:
    """Make ``entry`` visible under ``key``, whole or not at all, whoever else does so meanwhile."""
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=key[:8], suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(seal(entry))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / f"{key}.cubin")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        # Windows refuses to replace a file that another process reads: it has won, with the same.
        if find(key) is None:
            raise


@contextlib.contextmanager
def building(folder: Path, key: str):
    """Hold ``key`` so that other processes wait instead of building it too.

    The operating system drops the lock when its holder dies. Where the file system has no locks,
    or the holder hangs, the build goes on without: two processes then make the same entry.
    """
    lock = filelock.FileLock(folder / f"{key}.lock", timeout=_LOCK_SECONDS)
    try:
        lock.acquire()
    except (NotImplementedError, OSError) as error:  # a time-out is an OSError too
        log.debug("building without a lock in %s: %s", folder, error)
    try:
        yield
    finally:
        lock.release()


def entries() -> list[Path]:
    """The files of all entries that ``find`` would look at, whole or damaged."""
    return [path for folder in _candidates() for path in sorted(folder.glob("*.cubin"))]


def clear() -> tuple[int, int]:
    """Remove every entry and what killed builds left; answer the number of entries and bytes.

    Files of other kinds stay, for the user may have chosen a folder with other things in it.
    """
    count = size = 0
    for folder in filter(_trusted, _candidates()):
        if not folder.is_dir():
            continue
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name):
                count += path.suffix == ".cubin"
                size += path.stat().st_size
                path.unlink()
        with contextlib.suppress(OSError):  # something else is in it
            folder.rmdir()
    return count, size


def prune(folder: Path, current: Container[str] | None = None) -> None:
    """Remove entries that were not used for months and what killed builds left behind.

    current: keys of all that this version of the pack and of NVRTC may want. Other entries go
    after a week without use; until then another ComfyUI of this user may still want them.
    """
    for path in folder.iterdir():
        days = _LIFETIME_DAYS.get(path.suffix)
        if path.suffix == ".cubin" and current is not None and path.stem not in current:
            days = _OUTDATED_DAYS
        with contextlib.suppress(OSError):  # another process may prune at this moment
            if days and time.time() - path.stat().st_mtime > days * _DAY:
                path.unlink()


def seal(entry: Entry) -> bytes:
    record = json.dumps(entry.record).encode()
    body = entry.cubin + record + _LENGTH.pack(len(record))
    return body + hashlib.sha256(body).digest() + _FORMAT


def unseal(data: bytes) -> Entry | None:
    """The entry that ``seal`` made these bytes from; None if they are anything else."""
    body, digest, form = data[:-40], data[-40:-8], data[-8:]
    if form != _FORMAT or hashlib.sha256(body).digest() != digest:
        return None
    (length,) = _LENGTH.unpack(body[-_LENGTH.size :])
    content = body[: -_LENGTH.size]
    return Entry(content[:-length], json.loads(content[-length:]))


def _candidates() -> list[Path]:
    if chosen := os.environ.get(VARIABLE):
        return [Path(chosen).absolute(), _fallback()]
    try:
        own = platformdirs.user_cache_path("sageattention3", appauthor=False)
    except RuntimeError:
        return [_fallback()]
    # For a user without a home directory older platformdirs leave "~" in the path.
    return [own, _fallback()] if own.is_absolute() else [_fallback()]


def _fallback() -> Path:
    user = (
        os.geteuid() if hasattr(os, "geteuid") else "user"
    )  # Windows' temporary folder is private
    return Path(tempfile.gettempdir()) / f"sageattention3-{user}"


def _objection(folder: Path) -> str | None:
    """Why ``folder`` cannot hold entries; None if it can. Creates it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # As long as the longest name used, so that limits on path length show up here.
        with tempfile.NamedTemporaryFile(dir=folder, prefix="0" * 40, suffix=".cubin"):
            pass
    except OSError as error:
        return str(error)
    return None if _trusted(folder) else "another user owns it or may write to it"


def _trusted(folder: Path) -> bool:
    """False for a folder among everybody's temporary files into which others can plant kernels."""
    if folder != _fallback() or not hasattr(os, "geteuid"):
        return True
    try:
        status = folder.lstat()
    except OSError:
        return True  # it does not exist, so nothing is read from it
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not others_write
