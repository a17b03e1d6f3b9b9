"""Reads JSON into dataclasses by their annotations; an error names the path to the value."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import fields
from typing import Any

from ..errors import InputError, expected

#: Of the whole numbers in a document: what 64 bits hold.
LARGEST = 2**63 - 1


def brief(value: Any) -> str:
    """Returns ``value`` as an error quotes it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read(kind: Any, value: Any, name: str) -> Any:
    """Returns ``value``, read from JSON, as a value of the annotation ``kind``.

    Raises:
        InputError: it is something else; ``name`` is the path to it.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None:
            return None
        kind = next(argument for argument in arguments if argument is not types.NoneType)
        return read(kind, value, name)
    if kind is Any:
        return value
    if kind is float:
        if value is None:  # JSON's only way to write NaN
            return math.nan
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                pass
        raise expected(name, "a number", brief(value))
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise expected(name, "a list", brief(value))
        if origin is tuple and Ellipsis not in arguments and len(value) != len(arguments):
            raise expected(name, f"a list of {len(arguments)} values", brief(value))
        return origin(read(arguments[0], item, name) for item in value)
    if origin is dict:
        kind = dict
    if not hasattr(kind, "__dataclass_fields__"):
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise expected(name, f"a value of type {kind.__name__}", brief(value))
        if kind is int and abs(value) > LARGEST:
            raise expected(name, f"a whole number of at most {LARGEST}", brief(value))
        return value
    if not isinstance(value, dict):
        raise expected(name, "an object", brief(value))
    kinds = typing.get_type_hints(kind)
    given = {}
    for part in fields(kind):
        path = f"{name}: {part.name}"
        if part.name in value:
            given[part.name] = read(kinds[part.name], value[part.name], path)
        elif part.default is part.default_factory:  # both are MISSING: it has to be there
            raise InputError(f"{path}: expected a value, found none")
    return kind(**given)
