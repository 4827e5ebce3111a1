"""One adapter per model family: which attention calls a forward pass makes, in which order."""

from .blocks import CROSS_ROLES, Block, Family, LayerCall
from .table import FAMILIES

__all__ = ["CROSS_ROLES", "FAMILIES", "Block", "Family", "LayerCall"]
