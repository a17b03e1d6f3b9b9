"""Elementwise operators and their relatives: padding, activations, normalisation, softmax."""

from __future__ import annotations

import math
from typing import Any

from .. import _cpu
from ..devices.arrays import view
from ..errors import InputError
from .call import call_kernel, four_paddings, make_output, make_shape, refuse_overlap


def pad2d(
    input: Any,
    padding: int | tuple[int, ...],
    *,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Puts a border of zeros around ``input`` [N, C, H, W].

    ``padding`` is one number, rows and columns, or (above, left, below, right).
    """
    x = view("pad2d: input", input, ndim=4)
    shape = make_shape(
        "pad2d", _cpu.Pad2dShape, *x.shape, *four_paddings("pad2d: padding", padding)
    )
    y = make_output("pad2d", out, x, (*x.shape[:2], shape.out_h, shape.out_w))
    refuse_overlap("pad2d", y, x)
    call_kernel("pad2d", (x, y), (shape,), threads, stream)
    return y.array


def relu(input: Any, *, out: Any = None, threads: int | None = None, stream: Any = None) -> Any:
    """Computes max(x, 0) of every element, in any shape; NaN stays NaN. ``out`` may be ``input``."""
    return _elementwise("relu", input, out, threads, stream)


def tanh(input: Any, *, out: Any = None, threads: int | None = None, stream: Any = None) -> Any:
    """Computes the hyperbolic tangent of every element of an array of any shape. ``out`` may be ``input``."""
    return _elementwise("tanh", input, out, threads, stream)


def normalize(
    input: Any,
    scale: float,
    offset: float,
    *,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Turns pixels (uint8, any shape) into a network's input: float32 ``pixel * scale + offset``."""
    if not (math.isfinite(scale) and math.isfinite(offset)):
        raise InputError(f"normalize: expected a finite scale and offset, found {scale}, {offset}")
    x = view("normalize: input", input, dtype="uint8")
    shape = make_shape("normalize", _cpu.ElementwiseShape, math.prod(x.shape), 1)
    y = make_output("normalize", out, x, x.shape)
    refuse_overlap("normalize", y, x)
    call_kernel("normalize", (x, y), (shape, scale, offset), threads, stream)
    return y.array


def _elementwise(name: str, input: Any, out: Any, threads: int | None, stream: Any) -> Any:
    x = view(f"{name}: input", input)
    shape = make_shape(name, _cpu.ElementwiseShape, math.prod(x.shape), 4)
    y = make_output(name, out, x, x.shape)
    if y.address != x.address:
        refuse_overlap(name, y, x)
    call_kernel(name, (x, y), (shape,), threads, stream)
    return y.array


def lrn(
    input: Any,
    size: int,
    *,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Divides [N, C, ...] by ``(k + alpha / size * sum of squares of size near channels) ** beta``."""
    x = view("lrn: input", input)
    if len(x.shape) < 2:
        raise InputError(f"lrn: input: expected at least 2 dimensions, found {len(x.shape)}")
    shape = make_shape(
        "lrn", _cpu.LrnShape, *x.shape[:2], math.prod(x.shape[2:]), size, alpha, beta, k
    )
    y = make_output("lrn", out, x, x.shape)
    refuse_overlap("lrn", y, x)
    call_kernel("lrn", (x, y), (shape,), threads, stream)
    return y.array


def softmax(
    input: Any,
    *,
    reduction: bool = False,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Computes the softmax of every row of ``input`` [N, M]. ``out`` may be ``input``.

    As in PyTorch, a row with a NaN or +inf, or with nothing but -inf, comes out all NaN.
    """
    x = view("softmax: input", input, ndim=2)
    shape = make_shape("softmax", _cpu.SoftmaxShape, *x.shape)
    y = make_output("softmax", out, x, x.shape)
    if y.address != x.address:
        refuse_overlap("softmax", y, x)
    call_kernel("softmax", (x, y), (shape, bool(reduction)), threads, stream)
    return y.array
