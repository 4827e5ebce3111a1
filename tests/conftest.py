"""Loads the pack before any test module imports ``sageattention3.*``."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "sageattention3_loader", Path(__file__).resolve().parent.parent / "demo" / "pack.py"
)
_loader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_loader)
_loader.load_pack()
