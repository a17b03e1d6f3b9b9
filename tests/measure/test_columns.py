"""Values that are columns of a concatenation's: plans of memory, played with NumPy."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.operators.binary import Max, Sub
from cnn_engine.operators.mathematics import Neg
from cnn_engine.operators.shaping import Concat, Reshape, Slice, Split
from cnn_engine.plan import memory
from cnn_engine.plan.storages import Region

ITEM = 8  # bytes of int64


def case(seed: int) -> tuple[Graph, set[str], set[str]]:
    """Returns a random graph over rows of columns; the nodes that take pitches, and that run in place."""
    rng = np.random.default_rng(seed)

    def one(values: list):
        return values[rng.integers(len(values))]

    shapes = {"x": (int(rng.integers(1, 4)), 2, 4)}
    nodes: list[Node] = []
    for index in range(rng.integers(2, 20)):
        names = list(shapes)
        x = one(names[-4:])
        shape = shapes[x]
        alike = [name for name in names if shapes[name] == shape]
        near = [name for name in names if shapes[name][:-1] == shape[:-1]]
        y, z = f"y{index}", f"z{index}"
        kind = one(
            ["neg", "neg", "two", "two", "concat", "concat", "concat", "split", "rows", "shape"]
        )
        inputs, made = (x,), {y: shape}
        if kind == "two":
            op, inputs = one([Sub(), Max()]), (x, one(alike))
        elif kind == "concat":
            inputs = (x, *(one(near[-5:]) for _ in range(rng.integers(0, 4))))
            width = sum(shapes[name][-1] for name in inputs)
            op, made = Concat(one([-1, len(shape) - 1])), {y: (*shape[:-1], width)}
        elif kind == "split" and shape[-1] % 4 == 0:
            half = shape[-1] // 2
            op, made = Split(-1, (half, half)), {y: (*shape[:-1], half), z: (*shape[:-1], half)}
        elif kind == "rows" and shape[0] < 8:
            op, inputs, made = Concat(0), (x, one(alike)), {y: (2 * shape[0], *shape[1:])}
        elif kind == "shape":
            flat = (math.prod(shape[:-1]), shape[-1])
            op = Reshape(flat if shape != flat else (1, *shape))
            made = {y: op.shape}
        else:
            op = Neg()
        if max(math.prod(shape) for shape in made.values()) > 400:
            continue
        nodes.append(Node(f"n{index}", op, inputs, tuple(made)))
        shapes.update(made)
    nodes.append(Node("last", Neg(), (list(shapes)[-1],), ("last",)))
    made = [name for node in nodes for name in node.outputs if not isinstance(node.op, Reshape)]
    outputs = dict.fromkeys(("last", *(one(made) for _ in range(rng.integers(0, 2)))))
    graph = Graph("rows", (Value("x", shapes["x"], "int64"),), tuple(outputs), tuple(nodes))
    pitched = {node.name for node in nodes if rng.random() < one([0.5, 0.9, 1.0])}
    in_place = {n.name for n in nodes if n.op.kind in ("neg", "sub", "max") and rng.random() < 0.7}
    return graph, pitched, in_place


class Played:
    """A plan's memory as bytes, in which each value is seen where the plan says."""

    def __init__(self, graph: Graph, plan: memory.MemoryPlan) -> None:
        self.graph, self.plan = graph, plan
        self.memory = {arena: np.zeros(size, np.uint8) for arena, size in plan.sizes.items()}
        self.own = {
            name: np.zeros(graph.values[name].nbytes, np.uint8)
            for name in (*(value.name for value in graph.inputs), *graph.outputs)
        }

    def view(self, name: str) -> np.ndarray:
        value = self.graph.values[name]
        root, offset = self.plan.storage.get(name, (name, 0))
        if root in self.own:
            data = self.own[root]
        else:
            arena, start = self.plan.offsets[root]
            data, offset = self.memory[arena], start + offset
        pitch = self.plan.pitches.get(name, value.shape[-1])
        steps = [1] * len(value.shape)
        for axis in reversed(range(len(value.shape) - 1)):
            steps[axis] = (
                pitch if axis == len(value.shape) - 2 else steps[axis + 1] * value.shape[axis + 1]
            )
        strides = tuple(ITEM * step for step in steps)
        end = (
            offset
            + sum((n - 1) * step for n, step in zip(value.shape, strides, strict=True))
            + ITEM
        )
        assert end <= len(data)
        return np.ndarray(value.shape, np.int64, data, offset, strides)


@given(st.integers(0, 10**9))
@settings(max_examples=300, deadline=None)
def test_a_pass_over_the_planned_memory_is_exact(seed):
    """Whatever a node reads is what was made: no two values that are alive share a byte."""
    graph, pitched, in_place = case(seed)
    plan = memory.plan(
        graph,
        lambda name: "cpu",
        in_place=lambda node: node.name in in_place,
        is_alias=lambda node: isinstance(node.op, Reshape),
        allows_pitch=lambda node, place: node.name in pitched,
    )
    aliases = {node.name for node in graph.nodes if isinstance(node.op, Reshape)}
    for name in plan.pitches:
        # What is split writes no part that stays in its memory, and reads nothing where all parts do.
        maker = graph.producers[name]
        users = {
            user.name for user in graph.consumers[name] if not stays(plan, user, *user.outputs)
        }
        makers = set() if stays(plan, maker, name) else {maker.name}
        assert makers | users <= pitched | aliases
    played = Played(graph, plan)
    images = np.random.default_rng(seed).integers(-(2**60), 2**60, graph.values["x"].shape)
    played.view("x")[...] = images
    wanted = {"x": images}
    for node in graph.nodes:
        for name in node.inputs:
            np.testing.assert_array_equal(
                played.view(name), wanted[name], err_msg=f"{node.name}: {name}"
            )
        results = node.op.reference(*(wanted[name] for name in node.inputs))
        results = results if isinstance(results, tuple) else (results,)
        wanted.update(zip(node.outputs, results, strict=True))
        if isinstance(node.op, Reshape):
            continue
        if isinstance(node.op, Concat):
            write_parts(played, node)
            continue
        for name in node.outputs:
            played.view(name)[...] = wanted[name]
    for name in graph.outputs:
        np.testing.assert_array_equal(played.view(name), wanted[name], err_msg=name)


def stays(plan: memory.MemoryPlan, node: Node, *names: str) -> bool:
    """Whether these outputs of a split lie in the memory of what is split."""
    if not isinstance(node.op, Split | Slice):
        return False
    whole = plan.storage.get(node.inputs[0], (node.inputs[0], 0))[0]
    return all(plan.storage.get(name, (name, 0))[0] == whole for name in names)


def write_parts(played: Played, node: Node) -> None:
    """Copies the parts that do not lie where they should."""
    target, first = played.view(node.outputs[0]), 0
    for name in node.inputs:
        source = played.view(name)
        place = [slice(None)] * target.ndim
        place[node.op.axis] = slice(first, first + source.shape[node.op.axis])
        part = target[tuple(place)]
        first += source.shape[node.op.axis]
        if part.__array_interface__["data"][0] != source.__array_interface__["data"][0]:
            part[...] = source.copy()


@given(
    *[st.tuples(st.integers(0, 20), st.integers(1, 6), st.integers(0, 6), st.integers(1, 5))] * 2
)
@settings(max_examples=300, deadline=None)
def test_regions_that_meet(one, other):
    def bytes_of(region: Region) -> set[int]:
        return {
            region.start + row * region.pitch + byte
            for row in range(region.rows)
            for byte in range(region.run)
        }

    a, b = (Region(start, run, run + more, rows) for start, run, more, rows in (one, other))
    shared = bool(bytes_of(a) & bytes_of(b))
    assert a.meets(b) or not shared
    assert a.meets(b) == b.meets(a)
    if a.pitch == b.pitch and max(a.start, b.start) < min(a.end, b.end) and a.rows == b.rows > 1:
        columns = {byte % a.pitch for byte in bytes_of(a)} & {
            byte % a.pitch for byte in bytes_of(b)
        }
        assert a.meets(b) == bool(columns)
