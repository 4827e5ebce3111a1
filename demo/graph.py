"""Workflows (the frontend's format) as prompts (the server's format), whole or shrunk.

Workflows in ``workflows/`` name public checkpoints of many gigabytes. ``shrink`` puts a tiny model
and ready-made conditioning in the place of loaders and text encoders and leaves the rest as
shipped, so that the very MODEL -> Patch -> sampler -> Report path of the graph runs anywhere.
"""

from collections.abc import Iterator
from typing import Any

from .families import Family

Node = dict[str, Any]  # class_type, inputs
Prompt = dict[str, Node]
ObjectInfo = dict[str, dict[str, Any]]

NOTES = ("Note", "MarkdownNote")
RUN = 0  # node mode; 2 is muted, 4 bypassed
COMPANIONS = ("control_after_generate", "image_upload")
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


class GraphError(ValueError):
    """A workflow holds something that this host or this converter does not know."""


def inputs_of(node_info: dict[str, Any]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Input name -> (type or combo options, options), required ones first, in the node's order."""
    declared = {**node_info["input"].get("required", {}), **node_info["input"].get("optional", {})}
    return {name: (spec[0], spec[1] if len(spec) > 1 else {}) for name, spec in declared.items()}


def is_widget(kind: Any, options: dict[str, Any]) -> bool:
    return (isinstance(kind, list) or kind in WIDGET_TYPES) and not options.get("forceInput")


def widget_slots(node_info: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """(input name, is a companion) for each entry of the node's ``widgets_values``, in order.

    The frontend saves a second value, the companion, after a seed (what happens to it after a run)
    and after an uploadable file; the server never sees those.
    """
    for name, (kind, options) in inputs_of(node_info).items():
        if is_widget(kind, options):
            yield name, False
            if any(options.get(flag) for flag in COMPANIONS):
                yield name, True


def to_prompt(workflow: dict[str, Any], object_info: ObjectInfo) -> Prompt:
    """The prompt that the frontend would send for ``workflow`` (UI format 0.4).

    Covers what shipped workflows use: plain nodes, links, widgets and notes. Raises ``GraphError``
    for anything else (subgraphs, bypassed nodes, nodes that the host lacks).
    """
    nodes = {n["id"]: n for n in workflow["nodes"] if n["type"] not in NOTES}
    links = {link[0]: link for link in workflow["links"]}
    prompt = {}
    for node in sorted(nodes.values(), key=lambda n: n["order"]):
        where = f"node {node['id']} ({node['type']})"
        if node["type"] not in object_info:
            raise GraphError(f"{where} is unknown to this host")
        if node["mode"] != RUN:
            raise GraphError(f"{where} is muted or bypassed, which this converter does not resolve")
        slots = list(widget_slots(object_info[node["type"]]))
        values = node.get("widgets_values", [])
        if len(values) != len(slots):
            raise GraphError(
                f"{where} has {len(values)} widget values, the host wants {len(slots)}"
            )
        inputs = {
            name: value
            for (name, companion), value in zip(slots, values, strict=True)
            if not companion
        }
        for socket in node.get("inputs", []):
            if socket["link"] is not None:
                _, source, slot, *_ = links[socket["link"]]
                inputs[socket["name"]] = [str(source), slot]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


# What makes a shipped graph small: latent sizes, steps, and a Patch that quantises short sequences
# too, in emulation, as the demo machine has no native kernel.
SMALL = {"width": 64, "height": 64, "length": 9, "batch_size": 1, "steps": 2}
PATCH = {"min_tokens": 0, "emulation": True}
REPORT_NODE = "SageAttention3Report"
PATCH_NODE = "SageAttention3Patch"
COMPARE_NODE = "SageAttention3Compare"  # looks at what the report passes on


def shrink(
    prompt: Prompt,
    family: Family,
    object_info: ObjectInfo,
    sizes: dict[str, int] = SMALL,
    **patch: Any,
) -> Prompt:
    """``prompt`` with its big parts replaced; a SaveLatent stands in for the VAE decoder.

    family: the tiny model that stands in for model loaders, its conditioning for text encoders, its
    empty latent for latents that only a VAE could make. sizes: values for widgets of these names,
    wherever they are. patch: further widgets of the SageAttention3 Patch. Kept nodes keep their
    ids, stand-ins take the ids of what they replace.
    """
    small: Prompt = {}

    def follow(link: list[Any]) -> list[Any]:
        """Where a link that came from ``link`` comes from in the small prompt."""
        source, slot = link
        node = prompt[source]
        info = object_info[node["class_type"]]
        made = info["output"][slot]
        takes = {kind for kind, _ in inputs_of(info).values() if isinstance(kind, str)}
        if made == "MODEL" and "MODEL" not in takes:
            stand_in = family.model_node()
        elif made == "CONDITIONING" and "CONDITIONING" not in takes:
            stand_in = family.conditioning_node(seed=int(source))  # each prompt its own
        elif "VAE" not in takes:
            keep(source)
            return link
        elif made == "LATENT":
            stand_in = family.empty_latent_node(sizes["width"], sizes["height"], sizes["length"])
        else:
            return follow(node["inputs"][info["output_name"][slot]])
        small[source] = stand_in
        return [source, 0]

    def keep(node_id: str) -> None:
        if node_id in small:
            return
        node = prompt[node_id]
        inputs = {
            name: follow(value) if isinstance(value, list) else sizes.get(name, value)
            for name, value in node["inputs"].items()
        }
        if node["class_type"] == PATCH_NODE:
            inputs |= PATCH | patch
        small[node_id] = {"class_type": node["class_type"], "inputs": inputs}

    [report] = [i for i, node in prompt.items() if node["class_type"] == REPORT_NODE]
    keep(report)
    viewers = [i for i, node in prompt.items() if [report, 0] in node["inputs"].values()]
    compared = [i for i in viewers if prompt[i]["class_type"] == COMPARE_NODE]
    for viewer in compared:
        keep(viewer)
    [decoder] = [i for i in viewers if i not in compared]
    small[decoder] = {
        "class_type": "SaveLatent",
        "inputs": {"samples": [report, 0], "filename_prefix": "latents/demo"},
    }
    return small
