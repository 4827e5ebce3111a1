"""Loads the pack as ComfyUI does; a script of this folder imports it where it is run by its name.

`python benchmarks/x.py` puts this folder on sys.path, so it is found before the pack is there.
"""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "pack_loader", Path(__file__).resolve().parent.parent / "demo" / "pack.py"
)
_loader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_loader)
_loader.load_pack()
