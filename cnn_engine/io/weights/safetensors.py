"""Weights in the safetensors format: https://github.com/huggingface/safetensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...errors import InputError


def read(path: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of ``path``; bfloat16, which NumPy lacks, becomes float32, exactly.

    Raises:
        InputError: it is not a whole safetensors file, or holds another type that NumPy lacks.
    """
    from safetensors import SafetensorError, deserialize, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
            found = {name: file.get_tensor(name) for name, kind in kinds.items() if kind != "BF16"}
        for name, tensor in deserialize(path.read_bytes()) if len(found) < len(kinds) else ():
            if kinds[name] == "BF16":
                # The upper half of a float32 that has zeros in the lower.
                halves = np.frombuffer(tensor["data"], "<u2").astype(np.uint32)
                found[name] = (halves << 16).view(np.float32).reshape(tensor["shape"])
        return {name: found[name] for name in kinds}
    except (SafetensorError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: expected a safetensors file, found: {error}") from error
