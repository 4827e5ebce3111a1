"""Drives ComfyUI's real frontend in headless Chromium, through ``frontend.mjs``."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .host import HOST

MODULES = HOST / "browser" / "node_modules"  # holds playwright-core
SCRIPT = Path(__file__).with_name("frontend.mjs")
VIEWPORT = (2400, 1300)  # room for a shipped graph at full size
CROP_PAD = 12  # pixels around a cropped graph


class FrontendError(RuntimeError):
    """The browser could not be started, or the frontend did not get as far as it should."""


@dataclass(frozen=True)
class Visit:
    """What to do with one workflow.

    run: a prompt to run with the Run button after that, its nodes laid out as those of
    ``workflow`` with the same ids. clicks: CSS selectors of what to click after the run. look_at:
    that of what to describe at the end. loaded_png, done_png: where to leave screenshots of the
    workflow as loaded and at the end. vue_nodes: with the frontend's new nodes, "Nodes 2.0".
    """

    workflow: dict[str, Any]
    run: dict[str, Any] | None = None
    loaded_png: Path | None = None
    done_png: Path | None = None
    clicks: Sequence[str] = ()
    look_at: str = ""
    vue_nodes: bool = False


@dataclass(frozen=True)
class Sight:
    """What the frontend showed.

    prompt: the API prompt that it makes of the workflow. clicked_prompt: after the clicks, if there
    were any. seen: data attributes of what ``look_at`` selects. nodes: id, type, title, bounds
    [x, y, width, height], widgets (name -> value) and images [width, height] of each, at the end.
    status: the server's verdict on the run. errors: what the page threw.
    """

    prompt: dict[str, Any]
    clicked_prompt: dict[str, Any] | None
    seen: list[dict[str, str]]
    nodes: list[dict[str, Any]]
    status: dict[str, Any] | None
    errors: list[str]


def chromium() -> str:
    """Path of this machine's Chromium; raises ``FrontendError`` if it has none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        raise FrontendError("no Chromium found: install the package `chromium`")
    return found


def tour(
    url: str, visits: Sequence[Visit], *, crop: bool = False, timeout_s: float = 30
) -> list[Sight]:
    """Do ``visits`` one after the other in one browser, with the server at ``url``.

    crop: screenshots hold the graph alone. timeout_s: limit of each wait. Raises ``FrontendError``
    with the script's own words.
    """
    job = {
        "visits": [vars(visit) for visit in visits],
        "crop_pad": CROP_PAD if crop else None,
    }
    return [Sight(**answer) for answer in run_script(SCRIPT, url, job, timeout_s=timeout_s)]


def run_script(script: Path, url: str, job: dict[str, Any], *, timeout_s: float = 120) -> Any:
    """What ``script``, which uses ``page.mjs``, answers when it has done ``job`` at ``url``.

    timeout_s: limit of each wait. Raises ``FrontendError`` with the script's own words.
    """
    if not (MODULES / "playwright-core").is_dir() or not shutil.which("node"):
        raise FrontendError(
            "The browser's driver is not installed: run `python install.py test` once, without "
            "--no-browser"
        )
    job = {
        **job,
        "url": url,
        "viewport": VIEWPORT,
        "timeout_s": timeout_s,
        "modules": str(MODULES),
        "chromium": chromium(),
        "wait_for_node": "SageAttention3Report",
    }
    done = subprocess.run(
        ["node", script],
        input=json.dumps(job, default=str),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise FrontendError(done.stderr.strip())
    return json.loads(done.stdout)
