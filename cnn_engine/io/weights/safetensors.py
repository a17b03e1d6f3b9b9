"""Weights in the safetensors format: https://github.com/huggingface/safetensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from ...errors import InputError


def read(path: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of ``path``.

    Raises:
        InputError: it is not a whole safetensors file, or holds a type that NumPy lacks.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: expected a safetensors file, found: {error}") from error
