"""Which graphs are a chain that a fused kernel may be asked for: what it has no word for is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from graphs import Builder
from onnx_models import one_node

from cnn_engine import Engine
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.errors import UnsupportedError
from cnn_engine.graph.graph import Graph
from cnn_engine.kernels import select
from cnn_engine.lower import fused_network
from cnn_engine.operators.binary import Add
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.normalize import Normalize
from cnn_engine.operators.shaping import Reshape
from cnn_engine.operators.softmax import LogSoftmax
from cnn_engine.operators.unary import Relu, Sigmoid

CONV = Conv2d((1, 1), (1, 1, 1, 1))
POOL = MaxPool2d((2, 2), (2, 2))


def built(conv: Conv2d = CONV, pool: MaxPool2d = POOL, relu=Relu(), normalize=None) -> Graph:  # noqa: B008
    b = Builder((2, 4, 8, 8))
    x = "images" if normalize is None else b.add(normalize, "images")
    x = b.add(conv, x, b.constant((6, 4 // conv.groups, 3, 3)))
    b.add(pool, b.add(relu, x))
    return b.graph()


@pytest.mark.parametrize("normalize", [None, Normalize((2.0,), (-0.5,))])
def test_a_plain_chain_is_one_node(normalize):
    node = fused_network.chain(built(normalize=normalize), "float32")
    assert [inner.op.kind for inner in node.op.nodes] == ["conv2d", "relu", "max_pool2d"]
    assert (node.op.scale, node.op.offset) == ((1.0, 0.0) if normalize is None else (2.0, -0.5))
    assert node.covers == tuple(inner.name for inner in built(normalize=normalize).nodes)


def test_a_chain_ends_where_another_node_reads_what_it_makes():
    b = Builder((2, 4, 8, 8))
    first = b.add(CONV, "images", b.constant((6, 4, 3, 3)))
    second = b.add(Relu(), first)
    b.add(Add(), second, first)
    graph = b.graph()
    assert [node.op.kind for node in fused_network.chain(graph, "float32").op.nodes] == ["conv2d"]
    with pytest.raises(UnsupportedError, match="each reading the one before it"):
        fused_network.longest(graph, "float32", CpuDevice())


def test_as_many_layers_as_the_kernel_takes_and_none_before_the_last_image():
    """What is left to other nodes makes rows; a network whose rest makes images is no chain."""
    b = Builder((2, 4, 8, 8))
    x = b.add(CONV, "images", b.constant((6, 4, 3, 3)))
    rows = b.add(Reshape((2, -1)), b.add(Relu(), x))
    x = b.add(Linear(), rows, b.constant((5, 384)))
    b.add(LogSoftmax(1), x)
    graph = b.graph()
    assert fused_network.longest(graph, "float32", CpuDevice()) == 4
    node = fused_network.chain(graph, "float32", 4)
    assert node.covers == tuple(inner.name for inner in graph.nodes[:4])
    assert node.name == f"{graph.nodes[0].name} to {graph.nodes[3].name}"
    kinds = [kind for _, kind, _ in node.op.layers(graph.inputs_of(node))]
    assert kinds == [row[0] for row in node.op.description(graph.constants)[3]]
    with pytest.raises(UnsupportedError, match="expected one of conv2d"):
        fused_network.chain(graph, "float32", 5)
    weight = graph.nodes[3].inputs[1]
    broken = replace(graph, constants={**graph.constants, weight: graph.constants[weight] * np.nan})
    assert (
        fused_network.longest(broken, "float32", CpuDevice()) == 3
    )  # the linear layer runs by itself
    weight = graph.nodes[0].inputs[1]
    broken = replace(graph, constants={**graph.constants, weight: graph.constants[weight] * np.nan})
    with pytest.raises(UnsupportedError, match="layer 1 .conv2d.: weight: expected finite numbers"):
        fused_network.longest(broken, "float32", CpuDevice())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"conv": Conv2d((1, 1), (1, 1, 0, 0))}, "the same padding on both sides"),
        ({"conv": Conv2d((1, 1), (0, 1, 0, 0))}, "the same padding on both sides"),
        ({"conv": Conv2d((1, 1), (1, 1, 1, 1), (2, 2))}, "no dilation"),
        ({"conv": Conv2d((1, 1), (1, 1, 1, 1), groups=2)}, "one group"),
        ({"conv": Conv2d((1, 1), (1, 1, 1, 1), activation=Relu())}, "expected one group"),
        ({"pool": MaxPool2d((2, 2), (2, 2), (1, 1, 0, 0))}, "the same padding on both sides"),
        ({"pool": MaxPool2d((2, 2), (2, 2), dilation=(2, 2))}, "no dilation"),
        ({"relu": Sigmoid()}, "expected one of conv2d, max_pool2d, linear, relu, tanh, softmax"),
        ({"normalize": Normalize((1.0,) * 4, (0.0,))}, "one scale and offset for all channels"),
        ({"normalize": Normalize((1.0,), (0.0,) * 4)}, "one scale and offset for all channels"),
    ],
)
def test_what_a_chain_cannot_say_is_refused(changed, message):
    with pytest.raises(UnsupportedError, match=message):
        fused_network.longest(built(**changed), "float32", CpuDevice())


def images_out(channels: int, filters: int, size: int, kernel: int, pools: bool = False) -> Graph:
    b = Builder((1, channels, size, size))
    edge = kernel // 2
    x = b.add(
        Conv2d((1, 1), (edge,) * 4), "images", b.constant((filters, channels, kernel, kernel))
    )
    if pools:
        b.add(POOL, b.add(Relu(), x))
    return b.graph()


@pytest.mark.parametrize(
    ("graph", "fused"),
    [
        (images_out(3, 16, 512, 3), False),  # measured: 0.51 of the time as single kernels
        (images_out(3, 64, 128, 3), False),  # 0.63
        (images_out(3, 16, 512, 1), False),  # 0.71
        (images_out(16, 16, 512, 3), False),  # 0.88: what it hands on has left the caches
        (images_out(16, 16, 128, 3), True),  # 1.21
        (images_out(3, 32, 128, 3, pools=True), True),  # 1.15
        (images_out(256, 256, 7, 3), False),  # 0.42
        (images_out(64, 64, 28, 3), False),  # 0.88
    ],
)
def test_a_chain_is_one_kernel_where_it_works_enough_for_what_it_hands_on(graph, fused):
    """Of images, on the CPU, where ``auto`` asks: moving them to [C, H, W] must be worth it."""
    device = CpuDevice()
    count = fused_network.longest(graph, "float32", device)
    reason = fused_network.why_slower(graph, count, device)
    assert (reason is None) == fused, reason
    chosen = select.choose(
        "cpu", "auto", None, "float32", "resident", lambda: None, ("float32",), lambda: reason
    )
    assert (chosen.variant == "fused") == fused
    # Asked for by name, or for a type that single kernels lack, it runs as it is.
    for variant, dtype in (("fused", "float32"), ("auto", "bfloat16")):
        chosen = select.choose(
            "cpu", variant, None, dtype, "resident", lambda: None, ("float32",), lambda: reason
        )
        assert chosen.variant == "fused"


def test_rows_are_handed_on_as_they_are():
    b = Builder((2, 3, 64, 64))
    x = b.add(CONV, "images", b.constant((8, 3, 3, 3)))
    b.add(Reshape((2, -1)), x)
    graph = b.graph()
    assert fused_network.why_slower(graph, 1, CpuDevice()) is not None
    b.add(Linear(), graph.outputs[0], b.constant((2, 8 * 64 * 64)))
    graph = b.graph()
    assert fused_network.why_slower(graph, 3, CpuDevice()) is None


def test_an_engine_runs_one_convolution_of_a_large_image_by_its_own_kernel():
    x, weight = np.zeros((1, 3, 256, 256), np.float32), np.ones((16, 3, 3, 3), np.float32)
    proto, _ = one_node("Conv", [x, weight], known=(1,))
    with Engine(proto, device="cpu", threads=1) as engine:
        assert engine.choice.layered
        assert "multiply-adds for each value" in engine.choice.reason
