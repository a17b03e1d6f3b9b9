"""A result as JSON, schema 1, and back."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import numpy as np

from ..io.files import MOST_JSON_BYTES, parse_json, read_bytes
from ..measure.result import Result


def dumps(result: Result) -> str:
    """Returns :meth:`Result.to_dict` as standard JSON; NaN and infinities, which it lacks, are null."""
    return _render(finite(result.to_dict()), "") + "\n"


def load(path: str | os.PathLike[str]) -> Result:
    """Reads the result that ``run --json`` wrote to ``path``.

    Raises:
        InputError: the file cannot be read, or is not a result of schema 1.
    """
    return loads(read_bytes(path, MOST_JSON_BYTES), str(path))


def loads(content: str | bytes, name: str) -> Result:
    """Returns the result of a JSON document; ``name`` is for messages.

    Raises:
        InputError: it is no result of schema 1.
    """
    return Result.from_dict(parse_json(content, name, "the JSON document of a run"), name)


def finite(value: Any) -> Any:
    """Returns ``value`` with null for numbers that JSON cannot hold, and NumPy's numbers as Python's."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _render(value: Any, indent: str) -> str:
    """Returns ``value`` with a line for each key and item, but lists of plain values on one line."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        rows = [f"{json.dumps(key)}: {_render(item, inner)}" for key, item in value.items()]
        brackets = "{}"
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        rows = [_render(item, inner) for item in value]
        brackets = "[]"
    else:
        return json.dumps(value, allow_nan=False)
    joined = f",\n{inner}".join(rows)
    return f"{brackets[0]}\n{inner}{joined}\n{indent}{brackets[1]}"
