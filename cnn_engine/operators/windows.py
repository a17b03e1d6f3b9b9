"""Shared by convolutions and pools: padding, output sizes, windows as strided views."""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..errors import InputError

Pair = tuple[int, int]
Padding = tuple[
    int, int, int, int
]  # rows above, columns on the left, rows below, columns on the right


#: What positions and elements of one image are counted to: kernels index them with 32 bits.
LARGEST = 2**31 - 1


def check_image(name: str, shape: tuple[int, ...], padding: tuple[int, ...] = ()) -> None:
    """Raises InputError where one image of ``shape`` [N, C, ...], padded, has more elements than LARGEST."""
    rank = len(shape) - 2
    around = [padding[i] + padding[rank + i] for i in range(rank)] if padding else [0] * rank
    sizes = [size + more for size, more in zip(shape[2:], around, strict=True)]
    if math.prod((shape[1], *sizes)) > LARGEST:
        found = " x ".join(map(str, (shape[1], *sizes)))
        raise InputError(f"{name}: expected at most {LARGEST} elements an image, found {found}")


def output_sizes(
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[int, ...]:
    """Returns the positions of a window along each dimension.

    Args:
        padding: what stands before each dimension, then what stands after each.

    Raises:
        InputError: attributes do not fit the dimensions, or the window is larger than the padded input.
    """
    rank = len(sizes)
    for name, values, count, lowest in (
        ("kernel", kernel, rank, 1),
        ("stride", stride, rank, 1),
        ("padding", padding, 2 * rank, 0),
        ("dilation", dilation, rank, 1),
    ):
        if len(values) != count or not all(lowest <= value <= LARGEST for value in values):
            raise InputError(
                f"{name}: expected {count} whole numbers from {lowest} to {LARGEST}, "
                f"found {list(values)}"
            )
    result = []
    for i in range(rank):
        padded = sizes[i] + padding[i] + padding[rank + i]
        window = dilation[i] * (kernel[i] - 1) + 1
        if padded < window:
            raise InputError(
                f"expected a window of at most the padded input, found {window} over {padded}"
            )
        result.append((padded - window) // stride[i] + 1)
    return tuple(result)


def padded(x: np.ndarray, padding: tuple[int, ...], value: float = 0.0) -> np.ndarray:
    """Returns ``x`` [N, C, ...] with ``value`` around its last dimensions."""
    rank = len(padding) // 2
    width = [(0, 0)] * (x.ndim - rank) + [(padding[i], padding[rank + i]) for i in range(rank)]
    return np.pad(x, width, constant_values=value)


def windows(
    x: np.ndarray, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> np.ndarray:
    """Returns [N, C, positions..., taps...]: a view of every window over ``x`` [N, C, ...]."""
    rank = len(kernel)
    spans = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    view = sliding_window_view(x, spans, axis=tuple(range(2, 2 + rank)))
    positions = tuple(slice(None, None, step) for step in stride)
    taps = tuple(slice(None, None, step) for step in dilation)
    return view[(slice(None), slice(None), *positions, *taps)]
