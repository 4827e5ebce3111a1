"""Drives ComfyUI's real frontend in headless Chromium, through ``frontend.mjs``."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .host import HOST

MODULES = HOST / "browser" / "node_modules"
CROP_PAD = 12  # pixels around a cropped graph
SCRIPT = Path(__file__).with_name("frontend.mjs")


class FrontendError(RuntimeError):
    """The browser could not be started, or the frontend did not get as far as it should."""


@dataclass(frozen=True)
class Sight:
    """What the frontend showed.

    prompt: the API prompt that the frontend makes of the workflow. nodes: id, type, title, bounds
    [x, y, width, height], widgets (name -> shown label), texts and images [width, height] of each.
    status: the server's verdict on the run, None if nothing ran. errors: what the page threw.
    """

    prompt: dict[str, Any]
    nodes: list[dict[str, Any]]
    status: dict[str, Any] | None
    errors: list[str]


def chromium() -> str | None:
    """The Chromium on this machine, if any."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def open_workflow(
    url: str,
    workflow: dict[str, Any],
    *,
    run: dict[str, Any] | None = None,
    loaded_png: Path | None = None,
    done_png: Path | None = None,
    crop: bool = False,
    viewport: tuple[int, int] = (2400, 1300),
    locale: str = "en",
    timeout_s: float = 120,
) -> Sight:
    """Load ``workflow`` in the frontend of the server at ``url``; with ``run``, press Run.

    run: the prompt to run, its nodes laid out as those of ``workflow`` with the same ids.
    loaded_png, done_png: where to leave screenshots of the graph as loaded and after the run; with
    ``crop`` they hold the graph alone. Raises ``FrontendError`` with the script's own words.
    """
    job = {
        "url": url,
        "workflow": workflow,
        "run": run,
        "loaded_png": str(loaded_png) if loaded_png else None,
        "done_png": str(done_png) if done_png else None,
        "crop_pad": CROP_PAD if crop else None,
        "viewport": viewport,
        "locale": locale,
        "timeout_s": timeout_s,
        "modules": str(MODULES),
        "chromium": chromium(),
    }
    done = subprocess.run(
        ["node", SCRIPT], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FrontendError(done.stderr.strip())
    return Sight(**json.loads(done.stdout))
