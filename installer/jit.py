"""The pack's ``kernels/jit`` without the rest of the pack: it needs no torch."""

import importlib
import importlib.util
import sys
from types import ModuleType

from .place import ROOT

_NAME = "sageattention3_jit"


def load(module: str) -> ModuleType:
    """``kernels/jit/<module>.py``. Raises ImportError where a package that it needs is missing."""
    if _NAME not in sys.modules:
        folder = ROOT / "kernels" / "jit"
        spec = importlib.util.spec_from_file_location(
            _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules[_NAME] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{_NAME}.{module}")
