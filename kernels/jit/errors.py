"""The one exception type to catch: a kernel cannot be had, for a reason that its message tells."""


class JitError(RuntimeError):
    """A kernel cannot be built, loaded or launched."""
