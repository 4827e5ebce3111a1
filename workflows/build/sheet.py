"""A sheet of nodes in titled columns, written as ComfyUI's UI format 0.4."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...demo.graph import ObjectInfo, inputs_of, is_widget, widget_slots

# LiteGraph's own measures, in pixels.
TITLE, SLOT, WIDGET, GAP = 30, 20, 24, 8
COLUMN_GAP, NODE_GAP, GROUP_PAD, GROUP_HEAD = 60, 24, 14, 44

BLUE, GREEN, ORANGE, PURPLE = "#3f789e", "#5a8a5a", "#b06634", "#7a5a9a"


@dataclass(frozen=True)
class Model:
    """A public model file: a loader's widget value and the frontend's offer to download it."""

    name: str
    directory: str
    url: str


@dataclass(frozen=True)
class Output:
    node: int
    slot: int
    type: str


@dataclass
class Node:
    json: dict[str, Any]

    def __getitem__(self, name: str) -> Output:
        for slot, output in enumerate(self.json["outputs"]):
            if output["name"] == name:
                return Output(self.json["id"], slot, output["type"])
        raise KeyError(f"{self.json['type']} has no output {name!r}")


@dataclass
class Sheet:
    """Nodes are added in execution order, column by column from the left, each column top down."""

    object_info: ObjectInfo
    nodes: list[dict[str, Any]] = field(default_factory=list)
    links: list[list[Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    _x: float = 0
    _y: float = 0
    _width: float = 0

    def column(self, width: float) -> None:
        """Start a column to the right of the last one; nodes in it are ``width`` wide."""
        self._x += self._width + (COLUMN_GAP if self._width else 0)
        self._y = 0
        self._width = width

    @contextmanager
    def group(self, title: str, color: str = BLUE) -> Iterator[None]:
        """A titled frame around the nodes added inside the ``with`` block."""
        top = self._y
        self._y += GROUP_HEAD
        yield
        bottom = self._y - NODE_GAP + GROUP_PAD
        self.groups.append(
            {
                "id": len(self.groups) + 1,
                "title": title,
                "bounding": [
                    self._x - GROUP_PAD,
                    top,
                    self._width + 2 * GROUP_PAD,
                    bottom - top,
                ],
                "color": color,
                "font_size": 24,
                "flags": {},
            }
        )
        self._y = bottom + NODE_GAP

    def note(self, markdown: str, height: float) -> None:
        self._place(
            {
                "type": "MarkdownNote",
                "title": "Advice",
                "inputs": [],
                "outputs": [],
                "properties": {},
                "widgets_values": [markdown],
                "color": "#432",
                "bgcolor": "#653",
            },
            height,
        )

    def add(self, type_: str, title: str = "", min_height: float = 0, **given: Any) -> Node:
        """A node and its inputs: an ``Output`` for a link, a ``Model`` or a value for a widget.

        Widgets not given keep the node's default. ``min_height`` is for nodes that show text or
        pictures; the rest are as high as their slots and widgets need.
        """
        info = self.object_info[type_]
        declared = inputs_of(info)
        if unknown := given.keys() - declared.keys():
            raise KeyError(f"{type_} has no input {', '.join(sorted(unknown))}")
        node = {
            "type": type_,
            "inputs": self._sockets(declared, given),
            "outputs": [
                {"name": name, "type": kind, "links": []}
                for name, kind in zip(info["output_name"], info["output"], strict=True)
            ],
            "properties": self._properties(info, given),
            "widgets_values": self._widgets_values(info, declared, given),
        }
        if title:
            node["title"] = title
        slots = max(len(node["inputs"]), len(node["outputs"]))
        widgets = len(node["widgets_values"])
        natural = slots * SLOT + 6 + (widgets * WIDGET + GAP if widgets else 0)
        return Node(self._place(node, max(natural, min_height)))

    def _place(self, node: dict[str, Any], height: float) -> dict[str, Any]:
        placed = {
            "id": len(self.nodes) + 1,
            "type": node.pop("type"),
            "pos": [self._x, self._y + TITLE],
            "size": [self._width, height],
            "flags": {},
            "order": len(self.nodes),
            "mode": 0,
            **node,
        }
        for slot, socket in enumerate(placed["inputs"]):
            if source := socket["link"]:
                link = [
                    len(self.links) + 1, source.node, source.slot, placed["id"], slot, source.type
                ]  # fmt: skip
                self.links.append(link)
                self.nodes[source.node - 1]["outputs"][source.slot]["links"].append(link[0])
                socket["link"] = link[0]
        self.nodes.append(placed)
        self._y += TITLE + height + NODE_GAP
        return placed

    def _sockets(self, declared: dict[str, Any], given: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"name": name, "type": kind, "link": given.get(name)}
            for name, (kind, options) in declared.items()
            if not is_widget(kind, options)
        ]

    def _widgets_values(
        self, info: dict[str, Any], declared: dict[str, Any], given: dict[str, Any]
    ) -> list[Any]:
        values = []
        for name, companion in widget_slots(info):
            kind, options = declared[name]
            if companion:
                values.append("fixed" if kind == "INT" else "image")
            elif name in given:
                value = given[name]
                values.append(value.name if isinstance(value, Model) else value)
            else:
                choices = kind if isinstance(kind, list) else options.get("options", [""])
                values.append(options.get("default", choices[0]))
        return values

    def _properties(self, info: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        custom = info["python_module"].startswith("custom_nodes.")
        models = [vars(value) for value in given.values() if isinstance(value, Model)]
        return {
            "Node name for S&R": info["name"],
            "cnr_id": "sageattention3" if custom else "comfy-core",
            **({"models": models} if models else {}),
        }

    def workflow(self, name: str) -> dict[str, Any]:
        """The whole sheet as one workflow; the same sheet always gives the same JSON."""
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"sageattention3/{name}")),
            "revision": 0,
            "last_node_id": len(self.nodes),
            "last_link_id": len(self.links),
            "nodes": self.nodes,
            "links": self.links,
            "groups": self.groups,
            "config": {},
            "extra": {},
            "version": 0.4,
        }
