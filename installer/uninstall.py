"""Takes away what the pack keeps outside of its folder: the kernels built for this user."""

from . import jit
from .screen import SetupError


def uninstall() -> int:
    """Remove built kernels and their folder, if nothing else is in it."""
    try:
        cache = jit.load("cache")
    except ImportError as error:
        raise SetupError(
            f"The folder of built kernels cannot be named without the package {error.name}. Run "
            "this with ComfyUI's Python."
        ) from error
    count, size = cache.clear()
    print(f"SageAttention3: {count} built kernels removed ({size / (1 << 20):.1f} MiB).")
    print("Packages that other nodes may use were left. To remove the pack, delete its folder.")
    return 0
