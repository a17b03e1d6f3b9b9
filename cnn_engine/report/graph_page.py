"""A graph as one HTML page: its facts, its nodes, and a picture that needs no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.inspection import Inspection, NodeFacts
from . import inspection, units
from .pages import template

BOX_WIDTH, BOX_HEIGHT = 150, 36
GAP_X, GAP_Y = 24, 30
MARGIN = 12

#: Operators by what they are, each with a colour of its own.
FAMILIES = {
    "convolution": ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"),
    "product": ("linear", "matmul", "einsum"),
    "pool": (
        "max_pool2d", "max_pool3d", "average_pool2d", "average_pool3d", "lp_pool2d", "lp_pool3d",
    ),
    "normalisation": (
        "batch_norm", "instance_norm", "group_norm", "layer_norm", "rms_norm", "lrn", "softmax",
        "log_softmax", "normalize",
    ),
    "movement": (
        "reshape", "transpose", "concat", "split", "slice", "pad", "pad2d", "expand", "tile", "copy",
        "gather", "resize", "depth_to_space", "space_to_depth", "cast",
    ),
    "two operands": ("add", "sub", "mul", "div"),
}  # fmt: skip
OTHER = "function"


def family(kind: str) -> str:
    """Returns an operator's family, which has a colour."""
    for name, kinds in FAMILIES.items():
        if kind in kinds:
            return name
    return "reduction" if kind.startswith(("reduce_", "arg_")) else OTHER


@dataclass
class Box:
    """A node of the picture: a rectangle with its name and operator."""

    x: float
    y: float
    label: str
    detail: str
    title: str
    family: str


@dataclass
class Picture:
    """The drawing: boxes, and the paths between them."""

    width: float
    height: float
    boxes: list[Box]
    paths: list[str]


def picture(found: Inspection) -> Picture:
    """Lays out the graph: every node one row below the last node that it reads.

    Within a row nodes stand in the order of what they read; an edge goes from the bottom of a box to the top
    of another.
    """
    graph = found.graph
    # A box goes by the first value that comes out of it; an input's by the input.
    source = {value.name: value.name for value in graph.inputs}
    row = dict.fromkeys(source, 0)
    column = {name: float(index) for index, name in enumerate(source)}
    rows: list[list[NodeFacts]] = [[]]
    for node in found.nodes:
        box = node.outputs[0].name
        source.update((value.name, box) for value in node.outputs)
        row[box] = 1 + max((row[source[value.name]] for value in node.inputs), default=0)
        rows += [[] for _ in range(row[box] + 1 - len(rows))]
        rows[row[box]].append(node)
    for members in rows[1:]:
        wanted = [(_mean([column[source[v.name]] for v in n.inputs]), n) for n in members]
        wanted.sort(key=lambda pair: pair[0])
        middle = _mean([place for place, _ in wanted])
        for index, (_, node) in enumerate(wanted):
            column[node.outputs[0].name] = middle + index - (len(wanted) - 1) / 2
    lowest = min(column.values(), default=0.0)
    positions = {
        box: (
            MARGIN + (place - lowest) * (BOX_WIDTH + GAP_X),
            MARGIN + row[box] * (BOX_HEIGHT + GAP_Y),
        )
        for box, place in column.items()
    }
    boxes = [
        Box(*positions[v.name], v.name, inspection.shape(v), f"input {v.name}", "input")
        for v in graph.inputs
    ]
    paths = []
    for node in found.nodes:
        title = f"{node.name}: {node.kind} {node.attributes}; covers {', '.join(node.covers)}"
        shapes = ", ".join(map(inspection.shape, node.outputs))
        at = positions[node.outputs[0].name]
        boxes.append(Box(*at, node.kind, shapes, title, family(node.kind)))
        paths += [_edge(positions[source[value.name]], at) for value in node.inputs]
    widest = max(column.values(), default=0.0) - lowest
    height = 2 * MARGIN + len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    return Picture(2 * MARGIN + widest * (BOX_WIDTH + GAP_X) + BOX_WIDTH, height, boxes, paths)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _edge(above: tuple[float, float], below: tuple[float, float]) -> str:
    x0, y0 = above[0] + BOX_WIDTH / 2, above[1] + BOX_HEIGHT
    x1, y1 = below[0] + BOX_WIDTH / 2, below[1]
    bend = min((y1 - y0) / 2, 60)
    side = 0.0 if y1 - y0 <= GAP_Y + 1 else (BOX_WIDTH * 0.6 if x0 == x1 else 0.0)
    return f"M{x0:g} {y0:g}C{x0 + side:g} {y0 + bend:g} {x1 + side:g} {y1 - bend:g} {x1:g} {y1:g}"


def render(found: Inspection) -> str:
    """Returns the page."""
    drawn = picture(found)
    return (
        template("graph.html")
        .render(
            title=found.graph.name,
            summary=inspection.summary(found),
            nodes=found.nodes,
            notes=found.notes,
            kinds=found.kinds(),
            picture=drawn,
            families=list(dict.fromkeys(box.family for box in drawn.boxes)),
            box=(BOX_WIDTH, BOX_HEIGHT),
            shape=inspection.shape,
            units=units,
        )
        .strip()
        + "\n"
    )
