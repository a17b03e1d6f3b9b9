"""A graph run by its operators' references, in NumPy: floats in float64 throughout, the rest exactly."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import InputError
from .graph import Graph


def reference(graph: Graph, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns every output of ``graph`` by name: floats in float64, others in their own type.

    Args:
        inputs: name -> array of the shape that the graph has; floats of any type.

    Raises:
        InputError: an input is missing, unknown or of another shape.
    """
    wanted = {value.name: value for value in graph.inputs}
    if inputs.keys() != wanted.keys():
        raise InputError(
            f"{graph.name}: expected the inputs {', '.join(wanted)}, found {', '.join(inputs)}"
        )
    arrays: dict[str | None, np.ndarray | None] = {None: None, **graph.constants}
    for name, value in wanted.items():
        array = np.asarray(inputs[name])
        if array.shape != value.shape:
            raise InputError(
                f"{graph.name}: input {name!r}: expected shape {list(value.shape)}, "
                f"found {list(array.shape)}"
            )
        arrays[name] = array.astype(np.float64 if value.dtype.startswith("float") else value.dtype)
    uses = {name: len(nodes) for name, nodes in graph.consumers.items()}
    for node in graph.nodes:
        results = node.op.reference(*(arrays[name] for name in node.inputs))
        results = results if isinstance(results, tuple) else (results,)
        arrays.update(zip(node.outputs, results, strict=True))
        for name in {name for name in node.inputs if name is not None}:
            uses[name] -= 1
            if uses[name] == 0 and name not in graph.outputs:
                del arrays[name]
    return {name: _as_float64(arrays[name]) for name in graph.outputs}


def _as_float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64, copy=False) if array.dtype.kind == "f" else array
