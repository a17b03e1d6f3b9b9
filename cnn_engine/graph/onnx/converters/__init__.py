"""From ONNX's operators to the engine's records, one function an operator.

An ONNX operator whose name is that of a record's class, and whose attributes are the record's fields, needs
none: see :meth:`cnn_engine.graph.onnx.importer.Call.convert`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Converter = Callable[[Any], None]

#: (domain, operator) -> its converter; ONNX's own domain is ``""``.
CONVERTERS: dict[tuple[str, str], Converter] = {}


def converts(*operators: str, domain: str = "") -> Callable[[Converter], Converter]:
    """Registers a function for operators of a domain; it takes a ``Call``."""

    def register(function: Converter) -> Converter:
        for operator in operators:
            CONVERTERS[domain, operator] = function
        return function

    return register


from . import (  # noqa: E402, F401
    branching,
    einsum,
    microsoft,
    normalising,
    pointwise,
    quantized,
    recurrent,
    reducing,
    sampling,
    shaping,
    tables,
    windowed,
)
