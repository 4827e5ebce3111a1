"""What the registry ships, tracked files less .comfyignore, is whole: it installs and loads."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sageattention3.demo.pack import ROOT
from sageattention3.installer import comfyui, doctor

from ..test_docs import links_of

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None,
    reason="only a repository knows what belongs to a release",
)


def git_files(*options: str) -> set[str]:
    command = ["git", "-c", "core.quotepath=false", "ls-files", "-z", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split("\0") if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def shipped():
    new = git_files("--others", "--exclude-standard")  # of the next commit
    ignored = git_files("--cached", "--others", "--ignored", "--exclude-from=.comfyignore")
    return sorted((git_files("--cached") | new) - ignored)


@pytest.fixture(scope="module")
def unpacked(shipped, tmp_path_factory):
    """The release in the folder that an installation from the registry gives it."""
    folder = tmp_path_factory.mktemp("release")
    archive = folder / "node.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name in shipped:
            file.write(ROOT / name, name)
    assert archive.stat().st_size < 2_000_000 + 16 * 2**20  # the demo's model is 15 MiB of it
    pack = folder / "ComfyUI" / "custom_nodes" / "sageattention3"
    with zipfile.ZipFile(archive) as file:
        file.extractall(pack)
    return pack


def test_the_release_installs_and_loads_in_a_fresh_folder(unpacked):
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, unpacked / "install.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        [*command, "doctor", "--json"], env=environment, capture_output=True, text=True
    )
    report = json.loads(done.stdout)
    assert report["pack"]["nodes"]
    assert report["comfyui"]["found"]
    assert "problem" not in {row["level"] for row in report["advice"]}


def test_everything_that_a_creator_meets_is_in_it(shipped):
    wanted = ("kernels/cuda/", "locales/", "web/docs/", "workflows/api/", "docs/")
    tracked = git_files("--cached")
    for folder in wanted:
        files = {name for name in tracked if name.startswith(folder)}
        assert files
        assert files <= set(shipped)
    assert {"install.bat", "install.sh", "LICENSE", "pyproject.toml"} <= set(shipped)


def test_nothing_of_the_workshop_is_in_it(shipped):
    assert not [name for name in shipped if name.startswith(("tests/", ".", "workflows/build/"))]
    assert all(name.isascii() for name in shipped), "some tools that pack lose other names"


def test_the_links_of_its_documents_stay_within_it(shipped, unpacked):
    for page in (unpacked / name for name in shipped if name.endswith(".md")):
        for file, _ in links_of(page):
            assert file.exists(), f"{page.name}: {file}"


def test_the_tests_of_a_release_say_where_they_are(unpacked):
    command = [sys.executable, unpacked / "install.py", "test"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "not part of a release" in done.stderr
    assert not (unpacked / ".venv").exists()


def test_the_version_has_its_section_of_changes():
    version = doctor.pack_version()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_the_oldest_comfyui_is_the_same_everywhere():
    oldest = ".".join(map(str, comfyui.OLDEST))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'requires-comfyui = ">={oldest}"' in project
    assert f"({oldest} or newer)" in (ROOT / "README.md").read_text("utf-8")


def test_ci_runs_what_a_contributor_runs():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text("utf-8")
    assert "run: .ci/run" in workflow
    assert "install.py test" in Path(ROOT / ".ci" / "run").read_text("utf-8")
