"""A profile in words: the choice for a budget, the worst layers and what keeping them does."""

from collections.abc import Sequence
from textwrap import wrap

from .budget import Choice, keep_worst
from .forecast import contributions
from .profile import Profile
from .summary import SENTENCE_WIDTH, layer_ranges

LAYERS_SHOWN = 6  # in a sentence
WORST_SHOWN = 12  # rows of the table
KEPT = (1, 2, 4, 8)  # layers to try to keep in fp16


def explain_choice(choice: Choice, profile: Profile, max_error: float) -> str:
    """One sentence: what runs in what, how far off it should be, and what it gains."""
    parts = []
    for precision in dict.fromkeys(choice.precisions.values()):
        layers = choice.layers_in(precision)
        parts.append(f"{_layers(len(layers))} in {precision} ({_names(layers)})")
    ends = [
        f"the {which} {count} step{'s' if count > 1 else ''}"
        for which, count in (("first", choice.first), ("last", choice.last))
        if count
    ]
    edges = f", {' and '.join(ends)} all in fp16" if ends else ""
    how = f"measured on {profile.origin.gpu}" if choice.timed else "assumed, not timed"
    part = choice.seconds / choice.fp16_seconds if choice.fp16_seconds else 1.0
    return (
        f"Fastest within max_error {max_error:g}: {', '.join(parts)}{edges}; forecast error "
        f"{choice.error:.3g}, attention takes {part:.0%} of its time in fp16 ({how})"
    )


def describe_profile(profile: Profile, choice: Choice, max_error: float) -> str:
    """The report of a calibration: the choice, what keeping k layers does, the worst layers."""
    lines = [
        *wrap(explain_choice(choice, profile, max_error), SENTENCE_WIDTH),
        "",
        _origin(profile),
        "",
    ]
    for precision in profile.precisions:
        lines += _keeping(profile, precision)
    worst_first = _worst_first(profile, profile.precisions[0])
    lines += ["", *_table(profile, worst_first[:WORST_SHOWN])]
    lines += [
        "",
        "Hardest to quantise by their inputs alone: "
        f"{', '.join(profile.rank_by_predictors()[:LAYERS_SHOWN])}",
    ]
    return "\n".join(lines)


def _origin(profile: Profile) -> str:
    origin = profile.origin
    shape = "x".join(map(str, origin.shape))
    done = f"{profile.steps} steps"
    if profile.steps_done < profile.steps:
        done = f"interrupted after {profile.steps_done} of {done}"
    return (
        f"Profile of a {origin.family}: {_layers(len(profile.layers))}, {done}, latent {shape}, "
        f"measured on {origin.gpu}"
    )


def _keeping(profile: Profile, precision: str) -> list[str]:
    """What ``precision`` loses everywhere, and with a few layers kept in fp16."""
    everywhere = keep_worst(profile, precision, 0)
    lines = [f"All in {precision}: forecast error {everywhere.error:.3g}"]
    for count in KEPT:
        if count < len(profile.layers):
            kept = keep_worst(profile, precision, count)
            lines.append(
                f"  {_layers(count)} kept in fp16: {kept.error:.3g}"
                f"  (fp16_layers: {', '.join(layer_ranges(kept.layers_in('fp16')))})"
            )
    return lines


def _worst_first(profile: Profile, precision: str) -> list[int]:
    added = contributions(profile, precision).sum(1)
    return sorted(range(len(added)), key=lambda i: -added[i])


def _table(profile: Profile, rows: Sequence[int]) -> list[str]:
    """Attention's own error of each layer, worst of ``rows`` first."""
    head = ["layer", *(f"{p} rel. L1" for p in profile.precisions), "outlier ratio"]
    table = [head]
    for i in rows:
        errors = [profile.errors[p]["rel_l1"][i].nanmean().item() for p in profile.precisions]
        ratio = profile.predictors["outlier_ratio"][i].nanmean().item()
        table.append([profile.layers[i], *(f"{e:.3g}" for e in errors), f"{ratio:.3g}"])
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _names(layers: list[str]) -> str:
    ranges = layer_ranges(layers)
    more = f" and {len(ranges) - LAYERS_SHOWN} more" if len(ranges) > LAYERS_SHOWN else ""
    return ", ".join(ranges[:LAYERS_SHOWN]) + more


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"
