"""Quantised attention for torch. Imports neither ComfyUI nor the graph nodes, and needs no GPU."""

from .api import (
    Capability,
    UnsupportedAttentionError,
    attention,
    attention_trainable,
    capabilities,
    explain,
)
from .dispatch import Decision
from .precision import PRECISIONS

__all__ = [
    "PRECISIONS",
    "Capability",
    "Decision",
    "UnsupportedAttentionError",
    "attention",
    "attention_trainable",
    "capabilities",
    "explain",
]
