"""A result as JSON, schema 1."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from ..result import Result


def dumps(result: Result) -> str:
    """Returns :meth:`Result.to_dict` as standard JSON; NaN and infinities, which it lacks, are null."""
    return json.dumps(finite(result.to_dict()), indent=2, allow_nan=False) + "\n"


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
