"""Gets what the browser tests need: Chromium, and the library that drives it."""

import os
import shutil
import subprocess
from collections.abc import Callable

from .frontend import MODULES, FrontendError, chromium
from .host import HostError

DRIVER = "playwright-core@1.65.1"


def prepare(say: Callable[[str], None] = print) -> None:
    """Install Chromium and Node by Debian's names where they lack, and the driver under ``.host/``.

    Raises HostError, in words, where that takes rights or a package manager that are not there.
    """
    lacking = [] if _has_chromium() else ["chromium", "fonts-dejavu-core"]
    lacking += [name for name in ("nodejs", "npm") if not shutil.which(name.removesuffix("js"))]
    if lacking:
        say(f"Browser tests: installing {', '.join(lacking)}")
        _apt_install(lacking)
    if not (MODULES / "playwright-core" / "package.json").exists():
        say(f"Browser tests: installing {DRIVER}")
        MODULES.parent.mkdir(parents=True, exist_ok=True)
        _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(MODULES.parent), DRIVER])


def _has_chromium() -> bool:
    try:
        return bool(chromium())
    except FrontendError:
        return False


def _apt_install(packages: list[str]) -> None:
    if not shutil.which("apt-get") or os.geteuid() != 0:
        raise HostError(
            f"The browser tests need {', '.join(packages)}. Install them with this system's "
            "package manager, or leave these tests out: python install.py test --no-browser"
        )
    _run(["apt-get", "update", "-qq"])
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages])


def _run(command: list[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, check=False
    )
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-600:]
        raise HostError(f"`{' '.join(command)}` failed:\n{words}")
