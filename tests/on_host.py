"""Runs the tests that need a ComfyUI on any one: ``tests/on_host.py FOLDER [options of pytest]``.

Start it with that ComfyUI's own Python, which needs the test tools of requirements-host.txt too.
Nothing in FOLDER is changed: models, links to the pack and output lie in ``.host/base``.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("host", "server", "workflows", "cases")
# The shipped files are written on 0.3.75; other hosts have other widgets in other places.
ONLY_ON_ITS_OWN = "not recipe_writes_on_this_host and not without_a_frontend"


def main(folder: str, *options: str) -> int:
    comfy = Path(folder).resolve()
    if not (comfy / "main.py").is_file():
        print(f"{folder} is no ComfyUI: it has no main.py", file=sys.stderr)
        return 2
    environment = {**os.environ, "SAGEATTENTION3_COMFYUI": str(comfy), "OMP_NUM_THREADS": "1"}
    prepare = [sys.executable, ROOT / "demo" / "__main__.py", "prepare"]
    if status := subprocess.run(prepare, env=environment).returncode:
        return status
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "tests" / "pytest.ini"]
    command += ["-k", ONLY_ON_ITS_OWN, *options]
    if not any(Path(option.partition("::")[0]).exists() for option in options):
        command += [ROOT / "tests" / name for name in TESTS]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
