"""Readers of weights: one module a format, and the choice between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...errors import InputError
from ...graph.network import Network
from ..files import describe_os_error
from . import convnetjs, mxnet, safetensors


def read(path: str | Path, network: Network) -> dict[str, np.ndarray]:
    """Reads the weights of ``network`` from ``path``.

    A folder is read as ConvNetJS text, a ``.safetensors`` file as such, a ``.params`` file as MXNet's.

    Returns:
        name -> float32 array, in the shapes of ``network.parameters``.

    Raises:
        InputError: the file is missing, of an unknown format, damaged, or of another network.
    """
    path = Path(path)
    try:
        if path.is_dir():
            weights = convnetjs.read(path, network)
        elif not path.exists():
            raise InputError(f"weights: expected a file or folder, found none at {path}")
        elif path.suffix == ".safetensors":
            weights = safetensors.read(path)
        elif path.suffix == ".params":
            weights = mxnet.read(path, network)
        else:
            raise InputError(
                f"weights: expected a .safetensors file or a ConvNetJS folder (or MXNet's .params), "
                f"found {path}"
            )
    except OSError as error:
        raise InputError(f"weights: cannot read {path}: {describe_os_error(error)}") from error
    return network.check_weights(weights, str(path))
