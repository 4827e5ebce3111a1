"""Loads the pack the way ComfyUI does: from its folder, as one package, never through sys.path.

The repository's root must stay off ``sys.path``: its ``nodes`` would shadow ComfyUI's ``nodes.py``.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
NAME = "sageattention3"


def load_pack() -> ModuleType:
    """Import the pack as ``sageattention3``, once; its sub-modules import as usual afterwards."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    spec = importlib.util.spec_from_file_location(
        NAME, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[NAME]
        raise
    return module
