"""The NumPy float64 reference of graphs, networks and operators.

Floats are float64 throughout, the rest is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import InputError
from ..operators import conv2d as conv2d_
from ..operators import linear as linear_
from ..operators import max_pool2d as max_pool2d_
from ..operators import normalize as normalize_
from ..operators import pad2d as pad2d_
from ..operators import softmax as softmax_
from ..operators import unary
from ..operators.windows import Pair
from .graph import Graph
from .mapped import check, verify
from .network import Network, pair

#: Images of a network that are computed at a time: the windows of so many fit in the cache.
PART = 64


def reference(
    graph: Graph,
    inputs: Mapping[str, np.ndarray],
    run: Callable[..., Any] | None = None,
) -> dict[str, np.ndarray]:
    """Returns every output of ``graph`` by name: floats in float64, others in their own type.

    What the graph itself holds in float16 stays float16 between the nodes.

    Args:
        inputs: name -> array of the shape that the graph has; floats of any type.
        run: called with a node, the graph and the node's arrays in the place of its operator's reference.

    Raises:
        InputError: an input is missing, unknown or of another shape, or the weights' file has changed.
    """
    wanted = {value.name: value for value in graph.inputs}
    if inputs.keys() != wanted.keys():
        raise InputError(
            f"{graph.name}: expected the inputs {', '.join(wanted)}, found {', '.join(inputs)}"
        )
    check(graph.constants.values())
    verify(graph.constants.values())
    arrays: dict[str | None, np.ndarray | None] = {None: None, **graph.constants}
    for name, value in wanted.items():
        array = np.asarray(inputs[name])
        if array.shape != value.shape:
            raise InputError(
                f"{graph.name}: input {name!r}: expected shape {list(value.shape)}, "
                f"found {list(array.shape)}"
            )
        wide = value.dtype in ("float32", "float64")
        arrays[name] = array.astype(np.float64 if wide else value.dtype)
    uses = {name: len(nodes) for name, nodes in graph.consumers.items()}
    for node in graph.nodes:
        given = [arrays[name] for name in node.inputs]
        results = node.op.reference(*given) if run is None else run(node, graph, *given)
        results = results if isinstance(results, tuple) else (results,)
        for name, result in zip(node.outputs, results, strict=True):
            if graph.values[name].dtype == "float16":
                result = np.asarray(result).astype(np.float16)
            arrays[name] = result
        for name in {name for name in node.inputs if name is not None}:
            uses[name] -= 1
            if uses[name] == 0 and name not in graph.outputs:
                del arrays[name]
    return {name: _as_float64(arrays[name]) for name in graph.outputs}


def _as_float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64, copy=False) if array.dtype.kind == "f" else array


def forward(network: Network, weights: Mapping[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Runs ``network`` in float64.

    Args:
        images: uint8 pixels or float network input, [N, C, H, W].

    Returns:
        float64 [N, classes].
    """
    parts = []
    for first in range(0, len(images), PART):
        part = images[first : first + PART]
        graph = network.graph(len(part), part.dtype == np.uint8, weights)
        parts.append(*reference(graph, {"images": part}).values())
    return np.concatenate(parts) if parts else np.empty((0, network.classes))


def pad2d(x: np.ndarray, padding: int | Pair) -> np.ndarray:
    """Pads the rows and columns of ``x`` [N, C, H, W] on both sides with zeros."""
    return pad2d_.Pad2d(2 * pair("padding", padding)).reference(x)


def conv2d(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
) -> np.ndarray:
    """Cross-correlates ``x`` [N, C, H, W] with ``weight`` [K, C, R, S]; returns [N, K, OH, OW]."""
    record = conv2d_.Conv2d(pair("stride", stride), 2 * pair("padding", padding))
    return record.reference(x, weight, bias)


def relu(x: np.ndarray) -> np.ndarray:
    """Returns max(x, 0); NaN stays NaN."""
    return unary.Relu().reference(x)


def tanh(x: np.ndarray) -> np.ndarray:
    """Returns the hyperbolic tangent."""
    return unary.Tanh().reference(x)


def normalize(x: np.ndarray, scale: float, offset: float) -> np.ndarray:
    """Returns ``x * scale + offset``."""
    return normalize_.Normalize((scale,), (offset,)).reference(x)


def max_pool2d(
    x: np.ndarray, kernel: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0
) -> np.ndarray:
    """Takes the maximum of every window of ``x`` [N, C, H, W]; NaN wins; returns [N, C, OH, OW]."""
    kernel = pair("kernel", kernel)
    strides = kernel if stride is None else pair("stride", stride)
    return max_pool2d_.MaxPool2d(kernel, strides, 2 * pair("padding", padding)).reference(x)


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Returns ``x @ weight.T + bias`` for ``x`` [N, F] and ``weight`` [M, F]."""
    return linear_.Linear().reference(x, weight, bias)


def softmax(x: np.ndarray) -> np.ndarray:
    """Returns the softmax of every row of ``x`` [N, M]; a row with NaN or +inf comes out NaN."""
    return softmax_.Softmax().reference(x)
