"""Writes every workflow, its prompt in ``api/`` and its picture.

Run ``.venv/bin/python workflows/build`` after a change.

Needs the demo host (``python install.py demo`` makes it) and Chromium.
"""

import importlib.util
import json
import tempfile
from pathlib import Path

WORKFLOWS = Path(__file__).resolve().parent.parent


def load_pack() -> None:
    path = WORKFLOWS.parent / "demo" / "pack.py"
    spec = importlib.util.spec_from_file_location("sageattention3_loader", path)
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    loader.load_pack()


def main() -> None:
    load_pack()
    from PIL import Image
    from sageattention3.demo.frontend import Visit, tour
    from sageattention3.demo.host import HOST
    from sageattention3.demo.server import Server
    from sageattention3.workflows.build.catalogue import RECIPES, build, build_prompt
    from sageattention3.workflows.build.thumbnail import compose

    with Server(HOST / "workflows.log") as server, tempfile.TemporaryDirectory() as folder:
        object_info = server.object_info()
        visits = {}
        for name in RECIPES:
            text = build(name, object_info)
            (WORKFLOWS / f"{name}.json").write_text(text, encoding="utf-8")
            prompt = build_prompt(text, object_info)
            (WORKFLOWS / "api" / f"{name}.json").write_text(prompt, encoding="utf-8")
            visits[name] = Visit(json.loads(text), loaded_png=Path(folder, f"{name}.png"))
        tour(server.url, list(visits.values()), crop=True)
        for name, visit in visits.items():
            with Image.open(visit.loaded_png) as graph:
                picture = WORKFLOWS / f"{name}.jpg"
                compose(RECIPES[name].__doc__, visit.workflow, graph, picture)


if __name__ == "__main__":
    main()
