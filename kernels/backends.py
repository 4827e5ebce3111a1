"""The backends of this build, in the order in which dispatch tries them: native before emulated."""

from .backend import Backend
from .launch.fp4_backends import EMULATED_FP4, EMULATED_INT8_FP4, SM120_FP4, SM120_INT8_FP4
from .launch.sm80_int8 import SM80_INT8
from .launch.sm90_int8 import SM90_INT8
from .launch.sm90_sagebwd import SM90_SAGEBWD
from .reference.backend import REFERENCE

BACKENDS: tuple[Backend, ...] = (
    SM120_FP4,
    SM120_INT8_FP4,
    SM90_INT8,
    SM80_INT8,
    SM90_SAGEBWD,
    EMULATED_FP4,
    EMULATED_INT8_FP4,
    REFERENCE,
)


def named(name: str) -> Backend:
    """The backend of that name; dispatch has chosen it, so there is one."""
    for backend in BACKENDS:  # on the path of every call: a generator takes longer
        if backend.name == name:
            return backend
    raise KeyError(name)
