"""What kernels read before the kernel before them has ended: never what may not be there yet."""

from __future__ import annotations

import fake_cuda
import numpy as np
import pytest
from engines import single
from graphs import Builder, densenet, resnet
from test_dense_layer import block
from test_low_batch import network

from cnn_engine import Engine
from cnn_engine.graph import reference
from cnn_engine.graph.graph import Graph
from cnn_engine.operators.binary import Add, Mul
from cnn_engine.operators.reduce import ReduceMean
from cnn_engine.operators.shaping import Concat
from cnn_engine.operators.unary import Sigmoid
from cnn_engine.plan import early_reads
from cnn_engine.plan.builder import plan_memory


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A GPU that is not there, whose wgmma takes all that it can."""
    fake_cuda.install_hopper(monkeypatch)


def planned(graph: Graph, dtype: str = "float16"):
    """Returns the graph as it runs, where its values lie, and who reads ahead."""
    with Engine(graph, device="cuda", dtype=dtype) as engine:
        program = engine._plans.open()
        placed = program.placed(1, False)
        memory = plan_memory(placed, program.device_of, 1)
        return placed.graph, memory, early_reads.plan(placed, memory, program.prepared)


def dense(layers: int = 4, width: int = 64) -> Graph:
    b = Builder((1, width, 14, 14))
    x = b.relu(b.conv("images", width, 1))
    for _ in range(layers):
        x = b.add(Concat(1), x, b.conv(b.relu(b.conv(x, 128, 1)), 32))
    return b.graph(b.head(b.relu(b.conv(x, width, 1)), 10))


def residual(width: int = 64) -> Graph:
    """A block whose input is convolved by itself, and one whose input is added as it is."""
    b = Builder((1, width, 14, 14))
    x = b.relu(b.conv("images", width, 1))
    for filters in (2 * width, 2 * width):
        y = b.conv(b.relu(b.conv(b.relu(b.conv(x, width, 1)), width)), filters, 1)
        x = b.relu(b.add(Add(), y, x if b.shapes[x] == b.shapes[y] else b.conv(x, filters, 1)))
    return b.graph(b.head(x, 10))


def fire(width: int = 64) -> Graph:
    b = Builder((1, width, 14, 14))
    x = b.relu(b.conv("images", width, 1))
    for _ in range(2):
        y = b.relu(b.conv(x, 16, 1))
        x = b.add(Concat(1), b.relu(b.conv(y, width, 1)), b.relu(b.conv(y, width)))
    return b.graph(b.head(b.relu(b.conv(x, 16, 1)), 10))


def twice(width: int = 64) -> Graph:
    """A concatenation of which only the first part can be written in place, as it is the second one too."""
    b = Builder((1, width, 14, 14))
    x = b.relu(b.conv("images", width, 1))
    y = b.relu(b.conv(x, width))
    z = b.add(Concat(1), x, x, y)
    return b.graph(b.head(b.relu(b.conv(z, width, 1)), 10))


def check(graph: Graph, memory, found: early_reads.Ahead) -> None:
    """What is known is there when nothing from the holder on has run, but for parts of concatenations."""
    fed = {value.name: np.ones(value.shape) for value in graph.inputs}
    for reader, columns in found.known.items():
        place = graph.positions[reader]
        holder = max(
            graph.positions[name] for name in found.holders if graph.positions[name] < place
        )

        def run(node, graph, *arrays, holder=holder):
            made = node.op.reference(*arrays)
            if graph.positions[node.name] < holder or node.op.kind == "reshape":
                return made
            if isinstance(made, tuple):
                return tuple(np.full(one.shape, np.nan) for one in made)
            made = np.full(made.shape, np.nan)
            first = 0
            for name, part in (
                zip(node.inputs, arrays, strict=True) if node.op.kind == "concat" else ()
            ):
                base, offset = memory.storage.get(node.outputs[0], (node.outputs[0], 0))
                size = graph.values[name].item_bytes
                if memory.storage.get(name) == (base, offset + first * size):
                    made[..., first : first + part.shape[-1]] = part
                first += part.shape[-1]
            return made

        values: dict[str, np.ndarray] = {}

        def keep(node, graph, *arrays, values=values, run=run):
            made = run(node, graph, *arrays)
            several = made if isinstance(made, tuple) else (made,)
            values.update(zip(node.outputs, several, strict=True))
            return made

        reference.reference(graph, fed, keep)
        x = values[graph.nodes[place].inputs[0]]
        assert 0 < columns <= x.shape[-1]
        assert np.isfinite(x[..., :columns]).all(), reader
        assert not np.isfinite(x[..., columns:]).any(), reader


@pytest.mark.parametrize("dtype", ["float16", "tf32"])
@pytest.mark.parametrize(
    "graph",
    [
        dense(),
        residual(),
        fire(),
        twice(),
        network(32),
        resnet((2, 1), (1, 3, 32, 32)),
        densenet((3, 2), (1, 3, 32, 32)),
    ],
)
def test_what_is_known_is_there(graph, dtype):
    check(*planned(graph, dtype))


def test_layers_of_a_dense_block_know_all_but_the_last_one():
    graph, _, found = planned(dense())
    convolutions = [node for node in graph.nodes if node.op.kind == "conv2d_nhwc"]
    channels = {node.name: graph.values[node.inputs[0]].shape[-1] for node in convolutions}
    known = {channels[name]: columns for name, columns in found.known.items()}
    assert known == {96: 64, 128: 96, 160: 128, 192: 160}
    # The 1x1 convolution before, two kernels ahead, so that the last but one starts early too.
    positions = sorted(graph.positions[name] for name in found.holders)
    readers = sorted(graph.positions[name] for name in found.known)
    assert len(positions) == 4
    assert positions[1:] == readers[:-1]


def test_dense_layers_all_hold_and_know_all_but_the_last_one(monkeypatch):
    """Each reads ahead, so the kernel right before holds, too."""
    takes = staticmethod(lambda *how: True)
    monkeypatch.setattr(fake_cuda.FakeTensorCores, "dense_layer_takes", takes)
    graph, memory, found = planned(single(block(layers=5)[1]))
    check(graph, memory, found)
    layers = [node for node in graph.nodes if node.op.kind == "dense_layer"]
    channels = {node.name: graph.values[node.inputs[0]].shape[-1] for node in layers}
    assert list(channels.values()) == [64, 96, 128, 160]
    assert {node.name for node in layers} <= found.holders
    known = [found.known[name] for name in channels]
    assert known[1:] == [columns - 32 for columns in channels.values()][1:]
    assert known[0] == 64  # of which none was made right before


def test_a_blocks_input_is_known_to_the_convolution_beside_its_others():
    graph, _, found = planned(residual())
    ((reader, columns),) = found.known.items()
    node = graph.nodes[graph.positions[reader]]
    assert columns == 64
    assert node.inputs[3] is not None  # the others' sum
    (holder,) = found.holders
    assert graph.nodes[graph.positions[holder]].inputs[0] == node.inputs[0]


def test_what_is_computed_beside_what_is_read_is_waited_for():
    """Factors of a gate, which are applied to what was known."""
    b = Builder((1, 64, 14, 14))
    x = b.relu(b.conv("images", 64, 1))
    y = b.relu(b.conv(x, 64, 3))
    gate = b.add(Sigmoid(), b.conv(b.add(ReduceMean((2, 3)), y), 64, 1))
    graph, _, found = planned(b.graph(b.head(b.conv(b.add(Mul(), x, gate), 64, 1), 10)))
    gated = [node for node in graph.nodes if len(node.inputs) > 4 and node.inputs[4] is not None]
    assert gated
    assert not found.known
