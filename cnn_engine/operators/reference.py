"""The operators in NumPy float64: what every kernel's output is compared with.

Written for clarity and independence from the kernels: windows by strided views, sums by tensor
products. Inputs of any floating type or uint8 are taken as float64; layouts as in :mod:`cnn_engine.ops`.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..graph.network import Network, Pair, operator_of, pair


def pad2d(x: np.ndarray, padding: int | Pair, value: float = 0.0) -> np.ndarray:
    """Pads the rows and columns of ``x`` [N, C, H, W] on both sides with ``value``."""
    rows, columns = pair("padding", padding)
    width = ((0, 0), (0, 0), (rows, rows), (columns, columns))
    return np.pad(np.asarray(x, np.float64), width, constant_values=value)


def _windows(x: np.ndarray, kernel: Pair, stride: Pair) -> np.ndarray:
    """Returns [N, C, OH, OW, R, S]: a view of every window of ``x`` [N, C, H, W]."""
    return sliding_window_view(x, kernel, axis=(2, 3))[:, :, :: stride[0], :: stride[1]]


def conv2d(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
) -> np.ndarray:
    """Cross-correlates ``x`` [N, C, H, W] with ``weight`` [K, C, R, S]; returns [N, K, OH, OW]."""
    weight = np.asarray(weight, np.float64)
    windows = _windows(pad2d(x, padding), weight.shape[2:], pair("stride", stride))
    y = np.tensordot(windows, weight, axes=((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)
    return y if bias is None else y + np.asarray(bias, np.float64)[:, None, None]


def relu(x: np.ndarray) -> np.ndarray:
    """Returns max(x, 0); NaN stays NaN."""
    return np.maximum(np.asarray(x, np.float64), 0.0)


def tanh(x: np.ndarray) -> np.ndarray:
    """Returns the hyperbolic tangent."""
    return np.tanh(np.asarray(x, np.float64))


def normalize(x: np.ndarray, scale: float, offset: float) -> np.ndarray:
    """Returns ``x * scale + offset``."""
    return np.asarray(x, np.float64) * scale + offset


def max_pool2d(
    x: np.ndarray, kernel: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0
) -> np.ndarray:
    """Takes the maximum of every window of ``x`` [N, C, H, W]; NaN wins; returns [N, C, OH, OW]."""
    kernel = pair("kernel", kernel)
    stride = kernel if stride is None else pair("stride", stride)
    return _windows(pad2d(x, padding, -np.inf), kernel, stride).max(axis=(4, 5))


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Returns ``x @ weight.T + bias`` for ``x`` [N, F] and ``weight`` [M, F]."""
    y = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return y if bias is None else y + np.asarray(bias, np.float64)


def softmax(x: np.ndarray) -> np.ndarray:
    """Returns the softmax of every row of ``x`` [N, M]; a row with NaN or +inf comes out NaN."""
    x = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore"):
        exponentials = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf))
        return exponentials / exponentials.sum(axis=1, keepdims=True)


def forward(network: Network, weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Runs ``network`` in float64.

    Args:
        images: uint8 pixels or float network input, [N, C, H, W].

    Returns:
        float64 [N, classes].
    """
    parts = [
        _forward(network, weights, images[first : first + 64])  # windows of a part fit in the cache
        for first in range(0, len(images), 64)
    ]
    return np.concatenate(parts) if parts else np.empty((0, network.classes))


def _forward(network: Network, weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    if images.dtype == np.uint8:
        x = normalize(images, network.scale, network.offset)
    else:
        x = np.asarray(images, np.float64)
    for layer in network.layers:
        weight, bias = weights.get(f"{layer.name}.weight"), weights.get(f"{layer.name}.bias")
        match operator_of(layer):
            case "conv2d":
                x = conv2d(x, weight, bias, layer.stride, layer.padding)
            case "tanh":
                x = tanh(x)
            case "relu":
                x = relu(x)
            case "max_pool2d":
                x = max_pool2d(x, layer.kernel, layer.stride, layer.padding)
            case "linear":
                x = linear(x.reshape(len(x), -1), weight, bias)
            case "softmax":
                x = softmax(x.reshape(len(x), -1))
    return x.reshape(len(x), -1)
