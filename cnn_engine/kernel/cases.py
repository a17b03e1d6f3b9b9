"""Test cases of a kernel: records and shapes that find common faults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..graph.graph import Graph, Node
from ..kernels.user import CONTRACTS
from ..locks import cached_property
from ..operators import KINDS
from ..operators.operator import Operator, Value


@dataclass(frozen=True)
class Case:
    """One operator with its sizes.

    Attributes:
        label: what reports call it.
        op: the operator's record.
        shapes: of the inputs; None is an optional one that is absent.
    """

    label: str
    op: Operator
    shapes: tuple[tuple[int, ...] | None, ...]

    @cached_property
    def graph(self) -> Graph:
        """The operator by itself, with its weights as inputs."""
        names = CONTRACTS[self.op.kind].inputs
        given = tuple(
            None if shape is None else name for name, shape in zip(names, self.shapes, strict=False)
        )
        inputs = tuple(
            Value(name, shape)
            for name, shape in zip(names, self.shapes, strict=False)
            if shape is not None
        )
        return Graph(self.label, inputs, ("y",), (Node(self.label, self.op, given, ("y",)),))

    @property
    def node(self) -> Node:
        return self.graph.nodes[0]

    @property
    def outputs(self) -> tuple[int, ...]:
        """The shape of ``y``."""
        return self.graph.values["y"].shape

    @property
    def images(self) -> int:
        """Rows of ``y``, each of which depends on the same row of the inputs alone; 1 of a single number."""
        return self.outputs[0] if self.outputs else 1

    def image(
        self, inputs: dict[str, np.ndarray], number: int
    ) -> tuple[Case, dict[str, np.ndarray]]:
        """Returns the case of one image (row) of a batch, and its inputs."""
        whole = ("weight", "bias") if len(self.outputs) > 2 or self.op.kind != "matmul" else ("b",)
        part = {
            name: array if name in whole else array[number : number + 1]
            for name, array in inputs.items()
        }
        names = CONTRACTS[self.op.kind].inputs
        shapes = tuple(
            part[name].shape if name in part else None
            for name, _ in zip(names, self.shapes, strict=False)
        )
        return Case(self.label, self.op, shapes), part

    def arrays(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns fresh inputs: of normal distribution, weights scaled so that sums stay about 1."""
        found = {}
        for value in self.graph.inputs:
            array = generator.standard_normal(value.shape, np.float32)
            if value.name == "weight":
                array *= np.float32(1 / math.sqrt(max(math.prod(value.shape[1:]), 1)))
            found[value.name] = array
        return found


def of_node(graph: Graph, node: Node) -> Case:
    """Returns the case of a node of a network, without functions that rewrites put after its sum."""
    values = [None if value is None else value.shape for value in graph.inputs_of(node)]
    return Case(node.name, node.op, tuple(values[: len(CONTRACTS[node.op.kind].inputs)]))


def grid(op: str) -> list[Case]:
    """Returns the cases of an operator: the plain ones first, a large one last."""
    return list(_GRIDS.get(op, _elements)(op))


def _convolution(
    label: str, x: tuple[int, ...], filters: int, kernel: tuple[int, int], bias: bool = True,
    **attributes,
) -> Case:  # fmt: skip
    op = KINDS["conv2d"](**attributes)
    weight = (filters, x[1] // op.groups, *kernel)
    return Case(label, op, (x, weight, (filters,) if bias else None))


def _conv2d(op: str) -> Iterator[Case]:
    same = {"padding": (1, 1, 1, 1)}
    yield _convolution("one image, one channel", (1, 1, 8, 8), 1, (3, 3))
    yield _convolution("no bias", (2, 3, 9, 9), 4, (3, 3), bias=False)
    yield _convolution("odd sizes", (3, 5, 13, 17), 7, (5, 3))
    yield _convolution("1x1 kernel", (2, 6, 7, 11), 9, (1, 1))
    yield _convolution("kernel as large as the image", (2, 3, 5, 7), 2, (5, 7))
    yield _convolution("padding", (2, 3, 11, 12), 5, (3, 3), **same)
    yield _convolution("padding on one side", (1, 2, 6, 9), 3, (3, 3), padding=(2, 0, 1, 3))
    yield _convolution("stride", (2, 4, 15, 18), 6, (3, 3), stride=(2, 3), **same)
    yield _convolution("dilation", (1, 3, 16, 14), 4, (3, 3), dilation=(2, 3))
    yield _convolution("groups", (2, 6, 9, 8), 4, (3, 3), groups=2, **same)
    yield _convolution("one channel per group", (1, 8, 10, 10), 8, (3, 3), groups=8, **same)
    yield _convolution("one column", (2, 3, 33, 1), 4, (3, 1))
    yield _convolution("5x5 kernel", (3, 4, 21, 19), 10, (5, 5))
    yield _convolution("many filters", (1, 3, 6, 6), 130, (3, 3))
    yield _convolution("large", (8, 16, 48, 48), 32, (5, 5))


def _conv_transpose2d(op: str) -> Iterator[Case]:
    def case(label: str, x: tuple[int, ...], filters: int, kernel, bias=True, **attributes) -> Case:
        record = KINDS[op](**attributes)
        weight = (x[1], filters // record.groups, *kernel)
        return Case(label, record, (x, weight, (filters,) if bias else None))

    yield case("one image, one channel", (1, 1, 5, 5), 1, (3, 3))
    yield case("odd sizes", (3, 5, 7, 9), 4, (3, 2), bias=False)
    yield case("stride", (2, 3, 6, 5), 4, (3, 3), stride=(2, 3))
    yield case("padding", (2, 3, 6, 7), 4, (4, 4), stride=(2, 2), padding=(1, 1, 1, 1))
    yield case("more at the end", (1, 2, 4, 4), 3, (3, 3), stride=(2, 2), output_padding=(1, 1))
    yield case("dilation", (1, 3, 6, 6), 2, (3, 3), dilation=(2, 2))
    yield case("groups", (2, 6, 5, 6), 4, (3, 3), groups=2)
    yield case("large", (4, 16, 24, 24), 16, (4, 4), stride=(2, 2), padding=(1, 1, 1, 1))


def _pad2d(op: str) -> Iterator[Case]:
    record = KINDS[op]
    yield Case("one image, one channel", record((1, 1, 1, 1)), ((1, 1, 5, 5),))
    yield Case("no padding", record((0, 0, 0, 0)), ((2, 3, 7, 5),))
    yield Case("on one side", record((2, 0, 0, 3)), ((3, 2, 9, 13),))
    yield Case("wider than the image", record((4, 5, 6, 7)), ((1, 2, 3, 2),))
    yield Case("large", record((2, 2, 2, 2)), ((16, 16, 64, 64),))


def _pool(op: str) -> Iterator[Case]:
    record = KINDS[op]
    yield Case("one image, one channel", record((2, 2), (2, 2)), ((1, 1, 8, 8),))
    yield Case("odd sizes", record((2, 2), (2, 2)), ((3, 5, 13, 17),))
    yield Case("windows overlap", record((3, 3), (2, 2)), ((2, 4, 15, 12),))
    yield Case("padding", record((3, 3), (2, 2), (1, 1, 1, 1)), ((2, 3, 11, 14),))
    yield Case("padding on one side", record((3, 2), (1, 2), (2, 0, 0, 1)), ((1, 2, 7, 9),))
    yield Case("dilation", record((3, 2), (1, 1), dilation=(2, 3)), ((1, 2, 12, 11),))
    yield Case("the whole image", record((6, 7), (1, 1)), ((2, 5, 6, 7),))
    if op == "average_pool2d":
        counts = record((3, 3), (2, 2), (1, 1, 1, 1), count_include_pad=True)
        yield Case("padding counts", counts, ((2, 3, 11, 14),))
    yield Case("large", record((2, 2), (2, 2)), ((32, 16, 64, 64),))


def _linear(op: str) -> Iterator[Case]:
    for label, n, f, m, bias in (
        ("one of each", 1, 1, 1, True),
        ("one row", 1, 84, 10, True),
        ("no bias", 3, 17, 5, False),
        ("odd sizes", 7, 131, 33, True),
        ("many outputs", 2, 9, 517, True),
        ("large", 64, 1024, 512, True),
    ):
        yield Case(label, KINDS[op](), ((n, f), (m, f), (m,) if bias else None))


def _matmul(op: str) -> Iterator[Case]:
    for label, a, b in (
        ("one of each", (1, 1), (1, 1)),
        ("odd sizes", (7, 13), (13, 5)),
        ("several matrices", (3, 2, 9, 17), (3, 2, 17, 11)),
        ("one column", (19, 33), (33, 1)),
        ("large", (256, 384), (384, 320)),
    ):
        yield Case(label, KINDS[op](), (a, b))


def _rows(op: str) -> Iterator[Case]:
    for label, shape in (
        ("one of each", (1, 1)),
        ("one row", (1, 10)),
        ("odd sizes", (7, 33)),
        ("long rows", (3, 1234)),
        ("large", (512, 1000)),
    ):
        yield Case(label, KINDS[op](), (shape,))


def _lrn(op: str) -> Iterator[Case]:
    record = KINDS[op]
    yield Case("one image, one channel", record(3), ((1, 1, 5, 5),))
    yield Case("odd sizes", record(5, 0.5, 0.75, 2.0), ((2, 7, 5, 9),))
    yield Case("an even window", record(4, 0.5), ((2, 6, 3, 3),))
    yield Case("wider than the channels", record(9, 0.5), ((1, 3, 4, 4),))
    yield Case("large", record(5), ((16, 32, 32, 32),))


def _elements(op: str) -> Iterator[Case]:
    record, inputs = KINDS[op](), len(CONTRACTS[op].inputs)
    for label, shape in (
        ("one element", (1,)),
        ("one image, one channel", (1, 1, 5, 5)),
        ("odd sizes", (3, 5, 13, 17)),
        ("rows", (7, 33)),
        ("large", (64, 16, 32, 32)),
    ):
        yield Case(label, record, (shape,) * inputs)


_GRIDS = {
    "conv2d": _conv2d, "conv_transpose2d": _conv_transpose2d, "pad2d": _pad2d, "max_pool2d": _pool,
    "average_pool2d": _pool, "linear": _linear, "matmul": _matmul, "softmax": _rows,
    "log_softmax": _rows, "lrn": _lrn,
}  # fmt: skip
