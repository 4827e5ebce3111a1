"""The backends of this build, in the order in which dispatch tries them: native before emulated."""

from .backend import Backend
from .reference.backend import REFERENCE

BACKENDS: tuple[Backend, ...] = (REFERENCE,)
