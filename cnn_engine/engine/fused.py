"""Whole networks as one compiled call: from a :class:`~cnn_engine.graph.network.Network` to a
``FusedNetwork``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import _cpu
from ..graph.network import Conv2d, Linear, MaxPool2d, Network, operator_of, pair


def _kernels(device: Any) -> Any:
    return device.kernels if device.kind == "cuda" else _cpu


def description(network: Network, weights: Mapping[str, np.ndarray]) -> tuple:
    """Returns the arguments that both devices' ``FusedNetwork`` take before the data type.

    They hold the addresses of ``weights``, which must live until the constructor has copied them.
    """
    rows = []
    for layer in network.layers:
        kind, outputs, kernel, stride, padding = operator_of(layer), 0, (0, 0), (1, 1), (0, 0)
        match layer:
            case Conv2d():
                outputs = layer.out_channels
                kernel, stride = pair("kernel", layer.kernel), pair("stride", layer.stride)
                padding = pair("padding", layer.padding)
            case MaxPool2d():
                kernel, stride = pair("kernel", layer.kernel), layer.strides
                padding = pair("padding", layer.padding)
            case Linear():
                outputs = layer.out_features
        addresses = [
            weights[name].__array_interface__["data"][0] if name in weights else 0
            for name in (f"{layer.name}.weight", f"{layer.name}.bias")
        ]
        rows.append((kind, outputs, *kernel, *stride, *padding, *addresses))
    return network.input_shape, network.scale, network.offset, rows


def why_not(
    network: Network, weights: Mapping[str, np.ndarray], device: Any, dtype: str
) -> str | None:
    """Returns why ``device`` cannot run ``network`` as one kernel in ``dtype``, or None if it can."""
    place = (device.index,) if device.kind == "cuda" else ()
    try:
        kernels = _kernels(device).FusedNetwork
        return kernels.why_not(*description(network, weights), dtype, *place) or None
    except ValueError as error:
        return str(error)


def create(network: Network, weights: Mapping[str, np.ndarray], device: Any, dtype: str) -> Any:
    """Returns a ``FusedNetwork`` with its weights packed on ``device``; they are copied."""
    arguments = description(network, weights)
    if device.kind == "cuda":
        with device.context:
            return device.kernels.FusedNetwork(*arguments, dtype)
    return _cpu.FusedNetwork(*arguments, dtype)
