"""Graphs as JSON: records by their names and fields, and no code. Arrays stay apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np

from ..errors import InputError, UnsupportedError
from ..operators.operator import Operator, Value
from ..operators.region import Part
from ..types import Quantization
from .dims import Dim, Sizes, dim_of
from .graph import Graph, Node
from .guards import Guard, recorded
from .specialization import SymbolicGraph
from .terms import Compound

#: Characters of a name in a file.
LONGEST_NAME = 65536


@cache
def records() -> Mapping[str, type]:
    """Returns the classes that may be in a file, by name: every operator, and its parts."""
    found: dict[str, type] = {"Part": Part, "Quantization": Quantization}

    def add(kind: type) -> None:
        for one in kind.__subclasses__():
            found[one.__name__] = one
            add(one)

    add(Operator)
    return found


def encode(value: Any) -> Any:
    """Returns a value of a record as JSON.

    Raises:
        UnsupportedError: it is of a kind that no file holds.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return {"float": float(value).hex()}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, Dim):
        return {"dim": _encode_terms(value.terms)}
    name = type(value).__name__
    if records().get(name) is type(value):
        return {"record": name, **{f.name: encode(getattr(value, f.name)) for f in fields(value)}}
    raise UnsupportedError(f"save: expected records of operators, found {name} {value!r:.60}")


def decode(found: Any) -> Any:
    """Returns the value that :func:`encode` wrote.

    Raises:
        InputError: there is no such record.
    """
    if not isinstance(found, dict):
        return tuple(map(decode, found)) if isinstance(found, list) else found
    if found.keys() == {"float"}:
        return float.fromhex(found["float"])
    if found.keys() == {"dim"}:
        return dim_of(_decode_terms(found["dim"]))
    kind = records().get(found.get("record"))
    if kind is None:
        raise InputError(f"expected a record of an operator, found {found!r:.60}")
    given = {name: decode(item) for name, item in found.items() if name != "record"}
    if given.keys() != {field.name for field in fields(kind)}:
        raise InputError(f"{kind.__name__}: expected its fields, found {', '.join(given)!r:.60}")
    return kind(**given)


def _encode_terms(terms: Any) -> list:
    def factor(one: Any) -> Any:
        return (
            one
            if isinstance(one, str)
            else [one.kind, *map(_encode_terms, (one.first, one.second))]
        )

    return [[number, list(map(factor, factors))] for factors, number in terms]


def _decode_terms(found: Any) -> tuple:
    def factor(one: Any) -> Any:
        if isinstance(one, str):
            return one
        kind, first, second = one
        if kind not in ("floor", "min", "max"):
            raise InputError(f"expected floor, min or max, found {kind!r:.60}")
        return Compound(kind, _decode_terms(first), _decode_terms(second))

    return tuple((tuple(map(factor, factors)), _whole(number)) for number, factors in found)


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise InputError(f"expected a whole number, found {number!r:.60}")
    return number


def _name(text: Any) -> str:
    if not isinstance(text, str) or len(text) > LONGEST_NAME:
        raise InputError(f"expected a name, found {text!r:.60}")
    return text


def encode_graph(graph: Graph) -> dict[str, Any]:
    """Returns a graph without its arrays."""
    return {
        "name": graph.name,
        "inputs": [
            {
                "name": v.name, "shape": encode(v.shape), "dtype": v.dtype, "layout": v.layout,
                "storage_dtype": v.storage_dtype, "quantization": encode(v.quantization),
            }
            for v in graph.inputs
        ],
        "outputs": list(graph.outputs),
        "nodes": [
            [n.name, encode(n.op), list(n.inputs), list(n.outputs), list(n.covers)]
            for n in graph.nodes
        ],
        "batched": list(graph.batched),
        "storage_dtype": dict(graph.storage_dtype),
        "open_shapes": {name: encode(tuple(shape)) for name, shape in graph.open_shapes.items()},
        "metadata": dict(graph.metadata),
        "constants": list(graph.constants),
    }  # fmt: skip


def decode_graph(found: Any, arrays: Mapping[str, np.ndarray]) -> Graph:
    """Returns the graph of a file; every shape is inferred again, so that nothing of it is believed.

    Raises:
        InputError: it is not sound.
    """

    def names(key: str) -> tuple[str, ...]:
        return tuple(map(_name, found[key]))

    inputs = tuple(
        Value(
            _name(v["name"]), decode(v["shape"]), np.dtype(_name(v["dtype"])).name, _name(v["layout"]),
            _name(v["storage_dtype"]), decode(v["quantization"]),
        )
        for v in found["inputs"]
    )  # fmt: skip
    for value in inputs:
        if not all(isinstance(dim, Dim) or (type(dim) is int and dim >= 0) for dim in value.shape):
            raise InputError(f"input {value.name!r}: expected a shape, found {value.shape!r:.60}")
    nodes = []
    for name, op, reads, makes, covers in found["nodes"]:
        record = decode(op)
        if not isinstance(record, Operator):
            raise InputError(f"node {name!r:.60}: expected an operator, found {op!r:.60}")
        given = tuple(None if one is None else _name(one) for one in reads)
        nodes.append(
            Node(_name(name), record, given, tuple(map(_name, makes)), tuple(map(_name, covers)))
        )
    storage = {_name(n): _name(t) for n, t in found["storage_dtype"].items()}
    if not set(storage.values()) <= {"", "float16", "bfloat16"}:
        raise InputError("storage_dtype: expected float16 or bfloat16, found others")
    return Graph(
        _name(found["name"]), inputs, names("outputs"), tuple(nodes),
        {name: arrays[name] for name in names("constants")}, names("batched"),
        storage_dtype=storage,
        open_shapes={_name(n): decode(shape) for n, shape in found["open_shapes"].items()},
        metadata={_name(k): _name(v) for k, v in found["metadata"].items()},
    )  # fmt: skip


def encode_symbolic(found: SymbolicGraph) -> dict[str, Any]:
    """Returns a graph with symbols, and the decisions made with it."""
    guards = [[guard.kind, _encode_terms(guard.terms), guard.outcome] for guard in found.guards]
    return {**encode_graph(found.graph), "guards": guards}


def decode_symbolic(
    found: Any, arrays: Mapping[str, np.ndarray], choices: Iterator[Sizes]
) -> SymbolicGraph:
    """Returns the graph with symbols of a file.

    Args:
        choices: sizes of which the first that the guards allow decide what inference asks for.

    Raises:
        InputError: it is not sound, or for none of these sizes.
    """
    guards = tuple(
        Guard(_kind(kind), _decode_terms(terms), bool(outcome)) for kind, terms, outcome in found["guards"]
    )  # fmt: skip
    for sizes in choices:
        if all(guard.holds(dict(sizes.numbers)) for guard in guards):
            with recorded(sizes.numbers) as more:
                graph = decode_graph(found, arrays)
            return SymbolicGraph(graph, (*guards, *more.values()))
    raise InputError("expected a graph for the sizes that were saved, found none")


def _kind(kind: Any) -> str:
    if kind not in ("equal", "negative"):
        raise InputError(f"expected a decision, found {kind!r:.60}")
    return kind
