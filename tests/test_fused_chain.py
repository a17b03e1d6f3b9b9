"""Which graphs are a chain that a fused kernel may be asked for: what it has no word for is refused."""

from __future__ import annotations

import pytest
from graphs import Builder

from cnn_engine.engine import fused
from cnn_engine.errors import UnsupportedError
from cnn_engine.graph.graph import Graph
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.normalize import Normalize
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
    node = fused.chain(built(normalize=normalize), "float32")
    assert [inner.op.kind for inner in node.op.nodes] == ["conv2d", "relu", "max_pool2d"]
    assert (node.op.scale, node.op.offset) == ((1.0, 0.0) if normalize is None else (2.0, -0.5))
    assert node.covers == tuple(inner.name for inner in built(normalize=normalize).nodes)


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
        fused.chain(built(**changed), "float32")
