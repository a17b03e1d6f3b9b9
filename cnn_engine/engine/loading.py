"""Loads an engine's network from any of its forms, and its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import workload
from ..errors import InputError, expected
from ..graph.graph import Graph
from ..graph.model import Model
from ..graph.network import Network
from ..graph.stages import StagedModel
from ..io import weights as weight_files
from ..workload import Workload


def find(
    network: Any,
    input_shape: Mapping[str, Sequence[int | None]] | None,
    constants: Mapping[str, Any] | None = None,
) -> Workload | Network | Model | StagedModel:
    """Returns the network of an engine; see :class:`~cnn_engine.engine.engine.Engine`."""
    if isinstance(network, str) and not network.endswith(".onnx"):
        network = workload.get(network)
    if isinstance(network, (str, os.PathLike, bytes)) or hasattr(network, "SerializeToString"):
        from ..graph import onnx  # whose converters an engine that was saved does without

        network = onnx.load(network, input_shape=input_shape, constants=constants)
    else:
        for name, given in (("input_shape", input_shape), ("constants", constants)):
            if given is not None:
                raise expected(name, "an ONNX model", type(network).__name__)
    if isinstance(network, Graph):
        return Model(network) if network.found is None else StagedModel(network)
    if isinstance(network, (Workload, Network, Model, StagedModel)):
        return network
    raise expected(
        "network",
        "a workload's name, a Workload, a Network, a Graph or an ONNX model",
        repr(network),
    )


def read_weights(
    weights: str | Path | Mapping[str, np.ndarray], network: Network | Model, default: Path | None
) -> tuple[dict[str, np.ndarray], str]:
    """Returns the weights of ``network`` by name, and their source's name in reports.

    Args:
        weights: ``"default"``, ``"random"``, a path, or a mapping from parameter names to arrays.
        default: the file that ``"default"`` stands for, or None.

    Raises:
        InputError: there are no such weights, or they are not the network's.
    """
    if isinstance(network, Model):
        if weights != "default":
            raise expected("weights", "default, for a model has its own", repr(weights))
        return dict(network.base.constants), "the model's"
    if isinstance(weights, Mapping):
        return network.check_weights(dict(weights), "weights"), "given as arrays"
    if weights == "random":
        return network.random_weights(), "random"
    if not isinstance(weights, (str, Path)):
        raise expected("weights", "default, random, a path or a mapping of arrays", repr(weights))
    if weights != "default":
        return weight_files.read(weights, network), str(weights)
    if default is None:
        raise InputError(
            f"weights: expected a path or random, found default, but {network.name} "
            "comes without weights"
        )
    return weight_files.read(default, network), "default"
