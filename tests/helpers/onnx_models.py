"""Small ONNX models for tests."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def tensor(name: str, shape, dtype: int = TensorProto.FLOAT):
    """A graph's input or output; None leaves a dimension open, a word names it."""
    return helper.make_tensor_value_info(name, dtype, shape)


def model(nodes, inputs, outputs, constants=None, opset: int = 20, **more) -> onnx.ModelProto:
    """A model of nodes (``helper.make_node``), inputs and outputs (:func:`tensor`), name -> array."""
    initializers = [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    graph = helper.make_graph(nodes, "test", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", opset), *more.pop("opsets", [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, **more)


def one_node(operator: str, arrays, opset: int = 20, outputs: int = 1, known=(), **attributes):
    """A model of one node whose inputs ``known`` (by index) are constants.

    Returns:
        the model, and the arrays that are its inputs by name.
    """
    names = [f"x{i}" if array is not None else "" for i, array in enumerate(arrays)]
    fed = {
        name: np.asarray(array)
        for i, (name, array) in enumerate(zip(names, arrays, strict=True))
        if array is not None and i not in known
    }
    constants = {names[i]: arrays[i] for i in known}
    node = helper.make_node(operator, names, [f"y{i}" for i in range(outputs)], **attributes)
    inputs = [
        tensor(name, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype)) for name, a in fed.items()
    ]
    made = [helper.make_empty_tensor_value_info(f"y{i}") for i in range(outputs)]
    return model([node], inputs, made, constants, opset), fed


def onnxruntime_session(
    proto: onnx.ModelProto, optimized: bool = True
) -> onnxruntime.InferenceSession:
    """The model in ONNX Runtime, on one thread of the CPU."""
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def onnxruntime_outputs(
    proto: onnx.ModelProto, inputs: dict[str, np.ndarray], optimized: bool = True
) -> list[np.ndarray]:
    """What ONNX Runtime makes of the inputs."""
    return onnxruntime_session(proto, optimized).run(None, inputs)
