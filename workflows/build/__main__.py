"""Writes every workflow and its picture: ``.venv/bin/python workflows/build`` after a change.

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
    from sageattention3.demo.frontend import open_workflow
    from sageattention3.demo.server import Server
    from sageattention3.workflows.build.catalogue import RECIPES, build
    from sageattention3.workflows.build.thumbnail import compose

    with Server() as server, tempfile.TemporaryDirectory() as folder:
        object_info = server.object_info()
        for name, recipe in RECIPES.items():
            text = build(name, object_info)
            (WORKFLOWS / f"{name}.json").write_text(text, encoding="utf-8")
            workflow = json.loads(text)
            png = Path(folder, f"{name}.png")
            open_workflow(server.url, workflow, loaded_png=png, crop=True)
            with Image.open(png) as graph:
                compose(recipe.__doc__, workflow, graph, WORKFLOWS / f"{name}.jpg")
            print(name)


if __name__ == "__main__":
    main()
