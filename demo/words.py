"""The language of the demo's video model: five words say what moves, how, and over what.

A prompt is "red star circling over blue stripes": one word of each category, in this order.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

MODEL = Path(__file__).resolve().parent / "model"  # what training made, as shipped
EXAMPLE = "red star circling over blue stripes"

CATEGORIES: dict[str, tuple[str, ...]] = {
    "colour": ("red", "green", "blue", "yellow", "white", "purple", "cyan", "orange"),
    "shape": (
        *("circle", "ring", "moon", "square", "triangle", "star", "cross"),
        *("one", "two", "three", "four", "seven"),  # others differ from each other by one line
    ),
    "motion": ("still", "left", "right", "up", "down", "spinning", "growing", "circling"),
    "ground": ("red", "green", "blue", "yellow", "white", "purple", "cyan", "orange"),
    "texture": ("plain", "stripes", "checks", "dots"),
}
FILLERS = ("a", "the", "digit", "number", "moving", "over", "on")
CHANNELS = 64  # of each word
POOLED = 768  # what the host takes for granted in HunyuanVideo
SEED = 7
NOTHING = sum(map(len, CATEGORIES.values()))  # the row that says nothing


class Vocabulary(NamedTuple):
    """Fixed random vectors. table: [words, CHANNELS], category after category, the last one stands
    for nothing said. slots: [categories, CHANNELS], added to tell one category from another.
    """

    table: torch.Tensor
    slots: torch.Tensor

    def embed(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """words: [B, categories], int64, rows of ``table``.

        Returns the context [B, categories, CHANNELS] and the pooled vector [B, POOLED].
        """
        context = self.table[words] + self.slots
        pooled = torch.nn.functional.pad(context.flatten(1), (0, POOLED - context[0].numel()))
        return context, pooled


def vocabulary() -> Vocabulary:
    generator = torch.Generator().manual_seed(SEED)
    table = torch.randn(NOTHING + 1, CHANNELS, generator=generator)
    table[NOTHING] = 0
    return Vocabulary(table, torch.randn(len(CATEGORIES), CHANNELS, generator=generator))


@cache
def load() -> Vocabulary:
    """The vocabulary that the shipped model was trained with."""
    return Vocabulary(**load_file(MODEL / "vocabulary.safetensors"))


def conditioning(prompt: str) -> list[list[Any]]:
    """CONDITIONING of a prompt for the shipped model. Raises as :func:`parse`."""
    context, pooled = load().embed(parse(prompt)[None])
    return [[context, {"pooled_output": pooled}]]


def first_of(category: str) -> int:
    """The row of the category's first word."""
    names = list(CATEGORIES)
    return sum(len(CATEGORIES[name]) for name in names[: names.index(category)])


def parse(prompt: str) -> torch.Tensor:
    """[categories], int64: the rows of a prompt's words; an empty prompt says nothing.

    Raises ValueError with the words that are known where one is missing, unknown or out of place.
    """
    said = [word for word in prompt.lower().replace(",", " ").split() if word not in FILLERS]
    if not said:
        return torch.full((len(CATEGORIES),), NOTHING)
    if len(said) != len(CATEGORIES):
        raise ValueError(
            f"{prompt!r} has {len(said)} of the {len(CATEGORIES)} words that this model knows as "
            f'a prompt, such as "{EXAMPLE}"'
        )
    rows = []
    for word, (category, known) in zip(said, CATEGORIES.items(), strict=True):
        if word not in known:
            raise ValueError(f"{word!r} is no {category} that this model knows: {', '.join(known)}")
        rows.append(first_of(category) + known.index(word))
    return torch.tensor(rows)


def spell(rows: torch.Tensor) -> str:
    """The prompt of :func:`parse`'s rows."""
    everything = [word for known in CATEGORIES.values() for word in known]
    colour, shape, motion, ground, texture = (everything[row] for row in rows.tolist())
    return f"{colour} {shape} {motion} over {ground} {texture}"
