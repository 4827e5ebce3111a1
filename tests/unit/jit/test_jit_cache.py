"""The cache of built kernels: whole entries or none, in a folder that can be written."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sageattention3.kernels.jit import cache

KEY = "0123456789abcdef0123456789abcdef01234567"
ENTRY = cache.Entry(b"\x7fELF" + bytes(range(256)), {"function": "f", "log": "größe"})


def test_entry_comes_back_as_it_was_published():
    cache.publish(cache.writable_folder(), KEY, ENTRY)
    assert cache.find(KEY) == ENTRY
    assert cache.find(KEY[::-1]) is None


def test_publishing_leaves_no_temporary_file():
    folder = cache.writable_folder()
    cache.publish(folder, KEY, ENTRY)
    cache.publish(folder, KEY, ENTRY)
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.cubin"]


@given(st.integers(0, len(cache.seal(ENTRY)) - 1))
def test_entry_truncated_anywhere_is_no_entry(length):
    """QA-36."""
    assert cache.unseal(cache.seal(ENTRY)[:length]) is None


@given(st.integers(0, len(cache.seal(ENTRY)) - 1), st.integers(1, 255))
def test_entry_with_any_byte_changed_is_no_entry(at, change):
    data = bytearray(cache.seal(ENTRY))
    data[at] ^= change
    assert cache.unseal(bytes(data)) is None


@given(st.binary())
def test_foreign_bytes_are_no_entry(data):
    assert cache.unseal(data) is None


def test_publish_that_dies_midway_leaves_nothing_visible(monkeypatch):
    folder = cache.writable_folder()

    def die(handle):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(OSError, match="disk full"):
        cache.publish(folder, KEY, ENTRY)
    assert list(folder.iterdir()) == []


def test_publish_yields_to_a_process_that_published_first(monkeypatch):
    folder = cache.writable_folder()
    cache.publish(folder, KEY, ENTRY)

    def refuse(source, target):
        raise PermissionError("the file is open in another process")

    monkeypatch.setattr(os, "replace", refuse)
    cache.publish(folder, KEY, ENTRY)
    assert cache.find(KEY) == ENTRY


def test_pruning_keeps_what_is_used_and_removes_the_rest():
    folder = cache.writable_folder()
    cache.publish(folder, KEY, ENTRY)
    old = time.time() - 100 * 24 * 3600
    for name in ("unused.cubin", "01234567abc.tmp", f"{KEY}.lock", "notes.txt"):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (old, old))
    (folder / "89abcdef.tmp").write_bytes(b"being written")
    os.utime(folder / f"{KEY}.cubin", (old, old))
    assert cache.find(KEY)  # counts as use
    cache.prune(folder)
    left = {path.name for path in folder.iterdir()}
    assert left == {f"{KEY}.cubin", "89abcdef.tmp", "notes.txt"}


@pytest.fixture
def temporary(monkeypatch):
    """Another folder for temporary files, open to everybody as /tmp is."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_read_only_cache_folder_is_still_read_but_not_written(
    temporary, monkeypatch, as_ordinary_user
):
    """QA-38."""
    shared = temporary / "shared"
    monkeypatch.setenv(cache.VARIABLE, str(shared))
    cache.publish(cache.writable_folder(), KEY, ENTRY)
    shared.chmod(0o500)
    assert cache.find(KEY) == ENTRY
    assert cache.writable_folder() == temporary / f"sageattention3-{os.geteuid()}"
    shared.chmod(0o700)


def test_home_unset_and_user_unknown_falls_back_to_temporary_files(temporary, monkeypatch):
    for name in (cache.VARIABLE, "HOME", "XDG_CACHE_HOME", "USERPROFILE", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: os.fspath(path))
    assert cache.writable_folder() == temporary / f"sageattention3-{os.geteuid()}"
    assert not Path("~").exists()


def test_path_too_deep_for_the_file_system_falls_back(temporary, monkeypatch):
    """QA-38."""
    monkeypatch.setenv(cache.VARIABLE, "/".join([str(temporary), *["d" * 200] * 25]))
    assert cache.writable_folder() == temporary / f"sageattention3-{os.geteuid()}"


def test_deep_path_that_the_file_system_bears_is_used(temporary, monkeypatch):
    deep = temporary.joinpath(*["ünï 测试 " + "d" * 180] * 12)
    monkeypatch.setenv(cache.VARIABLE, str(deep))
    folder = cache.writable_folder()
    assert folder == deep
    cache.publish(folder, KEY, ENTRY)
    assert cache.find(KEY) == ENTRY


def test_fallback_folder_that_others_may_write_to_is_neither_read_nor_written(
    temporary, monkeypatch
):
    monkeypatch.setenv(cache.VARIABLE, "/dev/null/not a folder")
    planted = temporary / f"sageattention3-{os.geteuid()}"
    planted.mkdir()
    cache.publish(planted, KEY, ENTRY)
    assert cache.find(KEY) == ENTRY
    planted.chmod(0o777)
    assert cache.find(KEY) is None
    with pytest.raises(cache.CacheError, match="SAGEATTENTION3_CACHE"):
        cache.writable_folder()


def test_clearing_leaves_what_is_not_ours():
    folder = cache.writable_folder()
    cache.publish(folder, KEY, ENTRY)
    for name in (f"{KEY}.lock", "01234567abc_d.tmp", "notes.txt", "other.cubin", "photo.tmp"):
        (folder / name).write_bytes(b"")
    assert cache.clear() == (1, len(cache.seal(ENTRY)))
    assert {path.name for path in folder.iterdir()} == {"notes.txt", "other.cubin", "photo.tmp"}


def test_clearing_removes_a_folder_of_ours_alone():
    folder = cache.writable_folder()
    cache.publish(folder, KEY, ENTRY)
    cache.clear()
    assert not folder.exists()
    assert cache.clear() == (0, 0)


def test_entries_of_another_version_go_after_a_week_without_use():
    """QA-36: what an older version of the pack built is never found again."""
    folder = cache.writable_folder()
    current, outdated, recent = KEY, KEY[::-1], f"{7:040x}"
    now = time.time()
    for key, days in ((current, 30), (outdated, 8), (recent, 2)):
        cache.publish(folder, key, ENTRY)
        os.utime(folder / f"{key}.cubin", (now - days * 24 * 3600,) * 2)
    cache.prune(folder, {current})
    assert {path.stem for path in cache.entries()} == {current, recent}
