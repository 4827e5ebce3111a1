"""What the build has to make: one ``Variant`` per kernel instantiation, declared by a launcher."""

import importlib
import pkgutil
import struct
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class Variant:
    """One instantiation of one kernel, the same for every compute capability it serves.

    Compared and hashed by identity: launchers hold module-level variants, and a launch must not
    pay for hashing ten fields.
    """

    source: str  # file name in kernels/cuda
    kernel: str  # name of the __global__ function in it
    params: str  # struct format of the kernel's one parameter, native size and alignment
    threads: int  # per block; the first argument of __launch_bounds__
    template: tuple[int | bool | str, ...] = ()  # a str: an enumerator or type, in C++
    min_blocks: int = 1  # resident blocks per SM that the code is tuned for
    shared_bytes: int = 0  # dynamic shared memory per block
    first_sm: int = 80  # lowest compute capability served, major * 10 + minor
    last_sm: int = 121  # highest one
    ahead_from: int = 80  # lowest one that it is built for at installation; else on first use
    spill_bytes: int = 0  # register spills put up with ...
    spill_reason: str = ""  # ... and what makes them worth it

    def __post_init__(self):
        if self.spill_bytes and not self.spill_reason:
            raise ValueError(f"{self.name}: a spill allowance needs a spill_reason")
        struct.calcsize(self._format)  # a malformed format must fail where it is written

    @cached_property
    def expression(self) -> str:
        """The instantiation as C++ names it, e.g. ``sm80_int8_attention<128, true>``."""
        if not self.template:
            return self.kernel
        return f"{self.kernel}<{', '.join(_cpp(value) for value in self.template)}>"

    @property
    def name(self) -> str:
        return self.expression

    @property
    def _format(self) -> str:
        # C pads a struct to the alignment of its widest member; "0Q" makes struct do the same.
        return f"@{self.params}0Q"

    @cached_property
    def packer(self) -> struct.Struct:
        """Packs the kernel's parameter as the C++ struct lies in memory."""
        return struct.Struct(self._format)

    def serves(self, sm: int) -> bool:
        """Whether this variant is meant for compute capability ``sm`` (major * 10 + minor)."""
        return self.first_sm <= sm <= self.last_sm

    def is_built_ahead(self, sm: int) -> bool:
        """Whether an installation for compute capability ``sm`` builds it, used or not."""
        return self.serves(sm) and sm >= self.ahead_from


def registered() -> list[Variant]:
    """Every variant of every launcher in ``kernels/launch``, in the order of their names."""
    from .. import launch

    found: dict[str, Variant] = {}
    for module in pkgutil.iter_modules(launch.__path__):
        launcher = importlib.import_module(f"{launch.__name__}.{module.name}")
        for variant in getattr(launcher, "VARIANTS", ()):
            if found.setdefault(variant.name, variant) is not variant:
                raise ValueError(f"two variants are named {variant.name}")
    return [found[name] for name in sorted(found)]


def _cpp(value: int | bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
