"""Reading and planning take time by the number of nodes and of what they read, not by its square."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cpu_time import cpu_seconds
from fake_cuda import FakeCuda
from lowered import fuse, lay_channels_last

from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.graph.model import Model
from cnn_engine.graph.reference import reference
from cnn_engine.lower import pipeline
from cnn_engine.lower.placement import Placement, place
from cnn_engine.operators.average_pool2d import AveragePool2d
from cnn_engine.operators.binary import Add, Mul, Sub
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.copy import Copy
from cnn_engine.operators.mathematics import Neg
from cnn_engine.operators.matmul import Matmul
from cnn_engine.operators.norm import BatchNorm
from cnn_engine.operators.pad import Pad
from cnn_engine.operators.shaping import Concat, Reshape, Transpose
from cnn_engine.operators.unary import Relu, Tanh
from cnn_engine.plan import packing
from cnn_engine.plan.builder import plan_memory


def planned(graph: Graph) -> Graph:
    """Returns the graph as it is laid for a CPU, its memory planned."""
    graph = lay_channels_last(fuse(Model(graph).base))
    placed = place(graph, Placement(CpuDevice(), "resident", 1), None, None)
    plan_memory(placed, lambda _: CpuDevice(), 1)
    return graph


def made(nodes: list[Node], constants: dict[str, np.ndarray] | None = None) -> Graph:
    images = Value("x", (1, 4, 3, 3))
    return Graph("many", (images,), nodes[-1].outputs, tuple(nodes), constants or {}, ("x",))


def one_input(count: int) -> Graph:
    return made([Node("y", Concat(1), ("x",) * count, ("y",))])


def of_functions(count: int) -> Graph:
    """A concatenation of what functions make, one of them over what the one before has made."""
    names = [f"r{i}" for i in range(count)]
    nodes = [Node(f"n{i}", Neg(), ("x",), (f"n{i}",)) for i in range(count)]
    nodes += [Node(name, Relu(), (f"n{name[1:]}",), (name,)) for name in names]
    return made(
        [*nodes, Node("j", Concat(1), tuple(names), ("j",)), Node("y", Neg(), ("j",), ("y",))]
    )


def dense(count: int) -> Graph:
    """Concatenations of up to 16 earlier results, and a convolution of each."""
    rng = np.random.default_rng(0)
    nodes, constants = [], {}
    for i in range(count):
        before = [f"r{j}" for j in range(max(0, i - 15), i)]
        constants[f"w{i}"] = rng.normal(size=(4, 4 * (1 + len(before)), 1, 1)).astype(np.float32)
        nodes.append(Node(f"c{i}", Concat(1), ("x", *before), (f"c{i}",)))
        nodes.append(Node(f"r{i}", Conv2d(), (f"c{i}", f"w{i}"), (f"r{i}",)))
    return made(nodes, constants)


def residual(count: int) -> Graph:
    """Convolutions with a batch norm and a relu, and sums."""
    rng = np.random.default_rng(0)
    nodes, constants, x = [], {}, "x"
    for i in range(count):
        constants[f"w{i}"] = rng.normal(size=(4, 4, 1, 1)).astype(np.float32)
        constants[f"s{i}"] = rng.uniform(0.5, 1, 4).astype(np.float32)
        nodes += [
            Node(f"c{i}", Conv2d(), (x, f"w{i}"), (f"c{i}",)),
            Node(f"n{i}", BatchNorm(), (f"c{i}", *[f"s{i}"] * 4), (f"n{i}",)),
            Node(f"a{i}", Add(), (f"n{i}", x), (f"a{i}",)),
            Node(f"r{i}", Relu(), (f"a{i}",), (f"r{i}",)),
        ]
        x = f"r{i}"
    return made(nodes, constants)


def branches(count: int) -> Graph:
    """Values of which many are alive at once, and none is part of another."""
    nodes = [Node(f"n{i}", Neg(), ("x",), (f"n{i}",)) for i in range(count)]
    last = "x"
    for i in range(count):
        nodes.append(Node(f"a{i}", Add(), (last, f"n{i}"), (f"a{i}",)))
        last = f"a{i}"
    return made(nodes)


def calls_of(work: Callable[[], object]) -> int:
    """Returns how many functions are called."""
    count = 0

    def count_calls(_frame, event, _argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_calls)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(
    "network", [one_input, of_functions, dense, residual], ids=lambda n: n.__name__
)
def test_twice_the_nodes_take_twice_the_calls(network):
    planned(network(10))  # what is looked up once
    few, many = (calls_of(partial(planned, network(count))) for count in (60, 120))
    assert many < 2.3 * few


@pytest.mark.alone
@pytest.mark.parametrize("network", [one_input, of_functions, residual], ids=lambda n: n.__name__)
def test_large_graphs_take_time_by_their_size(network):
    """Names that are looked for in long lists are no calls. By the square it would be 100 times as long."""
    size = {one_input: 6000, of_functions: 600, residual: 120}[network]

    def seconds(count: int) -> float:
        # The least of three: other work on the machine takes caches away, which can double a time.
        return min(cpu_seconds(partial(planned, network(count))) for _ in range(3))

    assert seconds(10 * size) < 40 * seconds(size)


def test_what_is_known_of_a_node_is_not_inferred_again(monkeypatch):
    counted = []
    real = Graph._infer

    def infer(self, node, values):
        counted.append(node.name)
        return real(self, node, values)

    graph = residual(50)
    last = graph.nodes[-1]
    monkeypatch.setattr(Graph, "_infer", infer)
    after = graph.replaced([last], [replace(last, op=Tanh())])
    assert counted == [last.name]
    assert after.values == graph.values
    first = graph.nodes[0]  # what reads its output reads another value now
    after.replaced([first], [replace(first, op=Conv2d(activation=Relu()))])
    assert len(counted) <= 1 + len(graph.nodes)


def test_values_that_are_never_alive_together_are_packed_in_little_time():
    lives = [packing.Lifetime(i, 256 * (1 + i % 3), i, i + 2) for i in range(4000)]
    assert calls_of(lambda: packing.pack(lives)) < 300 * len(lives)
    assert packing.pack(lives)[1] == packing.most_alive(lives)


# -- all passes of a device, placing and planning ----------------------------------------------------

WEIGHT = np.random.default_rng(0).normal(size=(4, 4, 1, 1)).astype(np.float32)


def in_a_row(ops, count: int, *more: str, constants: dict | None = None) -> Graph:
    """Nodes that each read the one before; ``more`` are what each reads besides."""
    nodes, x = [], "x"
    for i in range(count):
        op = ops[i % len(ops)]
        inputs = (x, *(more if not isinstance(op, Relu) else ()))
        nodes.append(Node(f"n{i}", op, inputs, (f"n{i}",)))
        x = f"n{i}"
    return made(nodes, constants)


def functions(count: int) -> Graph:
    return in_a_row([Neg(), Relu(), Tanh(), Copy()], count)


def reshapes(count: int) -> Graph:
    return in_a_row([Reshape((1, 4, 9)), Reshape((1, 4, 3, 3))], count)


def convolutions(count: int) -> Graph:
    return in_a_row([Conv2d(), Relu()], count, "w", constants={"w": WEIGHT})


def every_value_is_an_output(count: int) -> Graph:
    graph = convolutions(count)
    return replace(graph, outputs=tuple(node.outputs[0] for node in graph.nodes[1::2]))


def concatenations(count: int) -> Graph:
    nodes, x = [], "x"
    for i in range(count // 2):
        nodes.append(Node(f"j{i}", Concat(2), (x, "x"), (f"j{i}",)))
        nodes.append(Node(f"r{i}", Relu(), (f"j{i}",), (f"r{i}",)))
        x = f"r{i}" if i % 8 else "x"
    return made(nodes)


def scales_and_shifts(count: int) -> Graph:
    """One convolution, and what its weights take in of what follows."""
    ones = {"k": np.full((4, 1, 1), 1.5, np.float32), "w": WEIGHT}
    graph = in_a_row([Add(), Sub()], count - 1, "k", constants={"k": ones["k"]})
    first = Node("c", Conv2d(), ("x", "w"), ("c",))
    second = replace(graph.nodes[0], inputs=("c", "k"))
    return made([first, second, *graph.nodes[1:]], ones)


def alive_together(count: int) -> Graph:
    return branches(count // 2)


def like_a_dense_net(count: int) -> Graph:
    return dense(count // 2)


def lowered_and_planned(graph: Graph, kind: str) -> None:
    """Does all that is done to a graph for a device before its first step is made."""
    device = CpuDevice() if kind == "cpu" else FakeCuda(tensor_cores=True)
    setting = pipeline.Setting(device, simplified=False)
    placed = place(
        pipeline.lower(graph, setting).graph, Placement(device, "resident", 1), None, None
    )
    plan_memory(placed, lambda _: device, 1)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "network",
    [functions, reshapes, convolutions, every_value_is_an_output, concatenations, scales_and_shifts,
     alive_together, like_a_dense_net],
    ids=lambda n: n.__name__,
)  # fmt: skip
def test_ten_times_the_nodes_take_ten_times_the_calls(network, kind):
    lowered_and_planned(network(10), kind)  # what is looked up once
    few, many = (
        calls_of(partial(lowered_and_planned, network(count), kind)) for count in (60, 600)
    )
    assert many < 14 * few


@pytest.mark.alone
@pytest.mark.parametrize(
    ("network", "kind"),
    [
        (functions, "cpu"),
        (concatenations, "cuda"),
        (scales_and_shifts, "cpu"),
        (alive_together, "cpu"),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_10_000_nodes_take_time_by_their_number(network, kind):
    """What looks for a name in a list makes no calls. By the square it would be 100 times as long."""
    few, many = network(1000), network(10_000)
    lowered_and_planned(few, kind)

    def seconds(graph: Graph) -> float:
        return min(cpu_seconds(partial(lowered_and_planned, graph, kind)) for _ in range(3))

    assert seconds(many) < 35 * seconds(few)


def test_thousands_that_are_alive_together_are_packed_tightly():
    rng = np.random.default_rng(0)
    lives = [
        packing.Lifetime(i, 256 * int(size), int(first), int(first + length))
        for i, (size, first, length) in enumerate(
            zip(
                rng.integers(1, 9, 4000),
                rng.integers(0, 4000, 4000),
                rng.integers(0, 2000, 4000),
                strict=True,
            )
        )
    ]
    offsets, nbytes = packing.pack(lives)
    assert nbytes <= 1.35 * packing.most_alive(lives)
    alive: list[packing.Lifetime] = []
    for life in sorted(lives, key=lambda life: life.first):
        alive = [other for other in alive if other.last >= life.first]
        begin = offsets[life.name]
        assert begin >= 0
        assert begin + life.nbytes <= nbytes
        assert not any(
            begin < offsets[other.name] + other.nbytes and offsets[other.name] < begin + life.nbytes
            for other in alive
        )
        alive.append(life)


def pads(count: int) -> Graph:
    nodes = in_a_row([Pad((0, 0, 1, 0, 0, 0, 0, 1))], count).nodes
    conv = Node("conv", Conv2d(), (nodes[-1].outputs[0], "w"), ("y",))
    return made([*nodes, conv], {"w": WEIGHT})


def pools(count: int) -> Graph:
    """Pools and convolutions of one element, by turns: all pools come first."""
    nodes, x = [], "x"
    for i in range(count):
        nodes.append(Node(f"c{i}", Conv2d(), (x, "w"), (f"c{i}",)))
        nodes.append(Node(f"p{i}", AveragePool2d((1, 1), (2, 2)), (f"c{i}",), (x := f"p{i}",)))
    images = Value("x", (1, 4, 2 ** (count + 1), 3))
    return Graph("pools", (images,), (x,), tuple(nodes), {"w": WEIGHT}, ("x",))


def constants_of_channels(count: int) -> Graph:
    """What is added to a product of channels, which only the layout makes a convolution."""
    rng = np.random.default_rng(0)
    steps = {f"k{i}": rng.uniform(0.5, 1.5, 4).astype(np.float32) for i in range(count)}
    nodes = [
        Node("t", Transpose((0, 2, 3, 1)), ("x",), ("t",)),
        Node("m", Matmul(), ("t", "v"), ("m",)),
    ]
    for i, op in zip(range(count), itertools.cycle((Add(), Mul())), strict=False):
        nodes.append(Node(f"n{i}", op, (nodes[-1].outputs[0], f"k{i}"), (f"n{i}",)))
    nodes.append(Node("y", Transpose((0, 3, 1, 2)), (nodes[-1].outputs[0],), ("y",)))
    return made(nodes, {**steps, "v": WEIGHT[:, :, 0, 0]})


@pytest.mark.parametrize(
    ("network", "name"),
    [(pads, "fold_padding"), (pools, "pool_before_convolutions"),
     (constants_of_channels, "fold_constants_after")],
    ids=lambda n: getattr(n, "__name__", n),
)  # fmt: skip
def test_a_row_of_nodes_is_rewritten_in_one_round(network, name):
    graph = network(12 if network is not pools else 5)
    lowered = pipeline.lower(graph, pipeline.Setting(CpuDevice(), simplified=False))
    assert [ran.name for ran in lowered.ran].count(name) == 1
    x = np.random.default_rng(1).normal(size=graph.inputs[0].shape).astype(np.float32)
    wanted = reference(graph, {"x": x})[graph.outputs[0]]
    (found,) = reference(lowered.graph, {"x": x}).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
