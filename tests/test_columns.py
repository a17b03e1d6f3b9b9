"""Values that are columns of a concatenation's: plans of memory, played with NumPy."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine.engine import memory
from cnn_engine.engine.memory import Region
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.operators.binary import Max, Sub
from cnn_engine.operators.shaping import Concat, Reshape, Split
from cnn_engine.operators.unary import Neg

ITEM = 8  # bytes of int64


@st.composite
def cases(draw):
    """Returns a graph over rows of columns, the nodes whose kernels take pitches, and those in place."""
    rows = draw(st.sampled_from([1, 3, 5]))
    shapes = {"x": (rows, 2, 4)}
    nodes: list[Node] = []
    for index in range(draw(st.integers(1, 16))):
        names = list(shapes)
        x = draw(st.sampled_from(names[-5:]))
        shape = shapes[x]
        alike = [name for name in names if shapes[name] == shape]
        near = [name for name in names if shapes[name][:-1] == shape[:-1]]
        kind = draw(
            st.sampled_from(
                ["neg", "sub", "max", "concat", "concat", "concat", "split", "rows", "shape"]
            )
        )
        inputs, made = (x,), {f"v{index}": shape}
        match kind:
            case "neg":
                op = Neg()
            case "sub" | "max":
                op = Sub() if kind == "sub" else Max()
                inputs = (x, draw(st.sampled_from(alike)))
            case "concat":
                more = draw(st.lists(st.sampled_from(near), min_size=0, max_size=3))
                inputs = draw(st.permutations([x, *more]))
                width = sum(shapes[name][-1] for name in inputs)
                if width > 60:
                    continue
                op, made = Concat(-1), {f"v{index}": (*shape[:-1], width)}
            case "split" if shape[-1] > 2:
                first = draw(st.sampled_from([2, shape[-1] // 2]))
                op = Split(len(shape) - 1, (first, shape[-1] - first))
                made = {
                    f"v{index}": (*shape[:-1], first),
                    f"w{index}": (*shape[:-1], shape[-1] - first),
                }
            case "rows":
                inputs = (x, draw(st.sampled_from(alike)))
                if shape[0] > 6:
                    continue
                op, made = Concat(0), {f"v{index}": (2 * shape[0], *shape[1:])}
            case "shape":
                wanted = (shape[0], -1) if len(shape) == 3 else (shape[0], 2, shape[1] // 2)
                op = Reshape(wanted)
                made = {f"v{index}": op.resolved(shape)} if shape[-1] % 2 == 0 else None
                if made is None:
                    continue
            case _:
                continue
        nodes.append(Node(f"n{index}", op, tuple(inputs), tuple(made)))
        shapes.update(made)
    if not nodes:
        nodes, shapes = [Node("n", Neg(), ("x",), ("v",))], {**shapes, "v": shapes["x"]}
    made = [name for node in nodes for name in node.outputs]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    aliases = {name for node in nodes if isinstance(node.op, Reshape) for name in node.outputs}
    outputs = [name for name in outputs if name not in aliases] or [
        next((name for name in reversed(made) if name not in aliases), None)
    ]
    if outputs == [None]:
        nodes, outputs = [*nodes, Node("last", Neg(), (made[-1],), ("last",))], ["last"]
    graph = Graph("rows", (Value("x", (rows, 2, 4), "int64"),), tuple(outputs), tuple(nodes))
    names = [node.name for node in nodes]
    pitched = (
        set(draw(st.lists(st.sampled_from(names), max_size=0)))
        if draw(st.booleans())
        else set(names)
    )
    pitched -= set(draw(st.lists(st.sampled_from(names), max_size=3)))
    in_place = {n.name for n in nodes if n.op.kind in ("neg", "sub", "max") and draw(st.booleans())}
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


@given(cases(), st.integers(0, 99))
@settings(max_examples=400, deadline=None)
def test_a_pass_over_the_planned_memory_is_exact(case, seed):
    """Whatever a node reads is what was made: no two values that are alive share a byte."""
    graph, pitched, in_place = case
    plan = memory.plan(
        graph,
        lambda name: "cpu",
        in_place=lambda node: node.name in in_place,
        is_alias=lambda node: isinstance(node.op, Reshape),
        takes_pitch=lambda node, place: node.name in pitched,
    )
    for name in plan.pitches:
        makers = {graph.producers[name].name, *(user.name for user in graph.consumers[name])}
        aliases = {node.name for node in graph.nodes if isinstance(node.op, Reshape)}
        assert makers <= pitched | aliases
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
