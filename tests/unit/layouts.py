"""Layouts for tests that need none of the host: shaped like real families, but small."""

from types import SimpleNamespace

from sageattention3.nodes.engine.families.blocks import SELF, SELF_CROSS, Stack, in_order
from sageattention3.nodes.engine.layout import Layout


def _layout(family: str, *stacks: Stack, **lengths: int) -> Layout:
    model = SimpleNamespace(**{name: [object()] * n for name, n in lengths.items()})
    return Layout(family, in_order(*stacks)(model))


HUNYUAN = _layout(
    "hunyuan_video",
    Stack("refiner", "refiner", SELF, main=False),
    Stack("double", "double", hook="double_block"),
    Stack("single", "single", hook="single_block"),
    refiner=2,
    double=4,
    single=6,
)
WAN = _layout("wan", Stack("block", "blocks", SELF_CROSS, hook="double_block"), blocks=5)
WAN_I2V = _layout("wan", Stack("block", "blocks", ("self", "image", "text")), blocks=3)
UNKNOWN = Layout("unknown (Novel)", known=False)
