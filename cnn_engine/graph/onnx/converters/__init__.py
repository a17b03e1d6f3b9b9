"""From ONNX's operators to the engine's records, one function an operator.

An ONNX operator whose name is that of a record's class, and whose attributes are the record's fields, needs
none: see :meth:`cnn_engine.graph.onnx.importer.Call.convert`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Converter = Callable[[Any], None]
CONVERTERS: dict[str, Converter] = {}


def converts(*operators: str) -> Callable[[Converter], Converter]:
    """Registers a function for ONNX operators; it takes a ``Call``."""

    def register(function: Converter) -> Converter:
        for operator in operators:
            CONVERTERS[operator] = function
        return function

    return register


from . import (  # noqa: E402, F401
    branching,
    einsum,
    normalising,
    pointwise,
    recurrent,
    reducing,
    sampling,
    shaping,
    tables,
    windowed,
)
