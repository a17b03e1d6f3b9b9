"""ONNX files whose sizes no kernel counts to: each is refused in one line, or runs."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import model, tensor

from cnn_engine import Engine
from cnn_engine.engine import inspection
from cnn_engine.errors import CnnEngineError
from cnn_engine.graph.onnx import load

node = helper.make_node
HUGE = (-(2**63), -(2**31), -1, 0, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1)
WEIGHT = {"w": np.ones((2, 2, 3, 3), np.float32)}


def over_images(kind, inputs=("x",), constants=None, shape=(1, 2, 8, 8), **attributes):
    return model(
        [node(kind, list(inputs), ["y"], **attributes)], [tensor("x", shape)], [tensor("y", None)],
        constants,
    )  # fmt: skip


def windows(size: int):
    """Operators with windows, each attribute in turn as large as ``size``."""
    for name, count in (("pads", 4), ("strides", 2), ("dilations", 2), ("kernel_shape", 2)):
        value = [size] + [1] * (count - 1)
        yield over_images("Conv", ("x", "w"), WEIGHT, **{name: value})
        yield over_images("ConvTranspose", ("x", "w"), WEIGHT, **{name: value})
        for kind in ("MaxPool", "AveragePool"):
            yield over_images(kind, **{"kernel_shape": [3, 3], name: value})
    yield over_images("Conv", ("x", "w"), WEIGHT, group=size)
    yield over_images("ConvTranspose", ("x", "w"), WEIGHT, output_shape=[size, 8])
    yield over_images("ConvTranspose", ("x", "w"), WEIGHT, output_padding=[size, 0])


def shapes(size: int):
    """Operators whose outputs are as large as ``size``."""
    integers = {"s": np.array([1, 2, size, 8], np.int64)}
    yield over_images("Resize", ("x", "", "", "s"), integers)
    yield over_images("Resize", ("x", "", "s"), {"s": np.float32([1, 1, size, 1])})
    yield over_images("Expand", ("x", "s"), integers)
    yield over_images("Tile", ("x", "s"), integers)
    yield over_images("Reshape", ("x", "s"), integers)
    yield over_images("Pad", ("x", "p"), {"p": np.array([0, 0, size, 0, 0, 0, 0, 0], np.int64)})
    yield over_images("DepthToSpace", blocksize=size)
    yield over_images("LRN", size=size)
    yield over_images("Softmax", axis=size)
    yield over_images("TopK", ("x", "k"), {"k": np.array([size], np.int64)})


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("models", [windows, shapes])
def test_attributes_that_no_kernel_counts_to(models, size):
    x = np.ones((1, 2, 8, 8), np.float32)
    for proto in models(size):
        try:
            graph = load(proto)
            inspection.inspect(graph, ())
            if sum(value.size for value in graph.values.values()) < 2**22:
                Engine(graph, device="cpu", threads=1).run({"x": x})
        except CnnEngineError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "shape", [(1, 2, 2**31, 1), (1, 2, 2**20, 2**19), (1, 2, 2**16, 2**16), (1, 2**31, 1, 1)]
)
@pytest.mark.parametrize("kind", ["Relu", "MaxPool", "Conv"])
def test_images_that_no_kernel_counts_to(kind, shape):
    attributes = {"kernel_shape": [3, 3], "pads": [1] * 4} if kind != "Relu" else {}
    inputs = ("x", "w") if kind == "Conv" else ("x",)
    proto = over_images(kind, inputs, WEIGHT if kind == "Conv" else None, shape, **attributes)
    try:
        inspection.inspect(load(proto), ())
    except CnnEngineError as error:
        assert "\n" not in str(error)
    else:
        assert kind == "Relu"


def test_a_type_that_is_none_is_refused():
    proto = model([node("Relu", ["x"], ["y"])], [tensor("x", [1])], [tensor("y", None)])
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.UNDEFINED
    with pytest.raises(CnnEngineError, match="UNDEFINED"):
        load(proto)
