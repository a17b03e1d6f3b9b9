"""Maxima and sums over windows."""

from __future__ import annotations

from typing import Any

from .. import _cpu
from ..devices.arrays import view
from ..errors import InputError
from ..graph.network import Pair, pair
from .call import call_kernel, four_paddings, make_output, make_shape, refuse_overlap


def max_pool2d(
    input: Any,
    kernel: int | Pair,
    *,
    stride: int | Pair | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | Pair = 1,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Takes the maximum of every window.

    A NaN in a window makes its output NaN; a window of -inf gives -inf, as in PyTorch.

    Args:
        input: [N, C, H, W].
        kernel: rows and columns of the window.
        stride: None: windows side by side.
        padding: less than the window: one number, rows and columns, or (above, left, below, right); positions
            outside the image do not take part.
        dilation: rows and columns from one place of a window to the next.
        out: [N, C, OH, OW] with OH = (H + above + below - dilation * (kernel - 1) - 1) // stride + 1.
    """
    x = view("max_pool2d: input", input, ndim=4)
    kernels = pair("max_pool2d: kernel", kernel)
    strides = kernels if stride is None else pair("max_pool2d: stride", stride)
    paddings = four_paddings("max_pool2d: padding", padding)
    dilations = pair("max_pool2d: dilation", dilation)
    shape = make_shape(
        "max_pool2d", _cpu.MaxPool2dShape, *x.shape, *kernels, *strides, *paddings, *dilations
    )
    y = make_output("max_pool2d", out, x, (*x.shape[:2], shape.out_h, shape.out_w))
    refuse_overlap("max_pool2d", y, x)
    call_kernel("max_pool2d", (x, y), (shape,), threads, stream)
    return y.array


def average_pool2d(
    input: Any,
    kernel: int | Pair,
    *,
    stride: int | Pair | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | Pair = 1,
    extra: int | Pair = 0,
    count_include_pad: bool = False,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Takes the mean of every window.

    Args:
        extra: rows below and columns on the right, beyond the padding, that only make room for a last window.
        count_include_pad: divide by the positions in the image and its padding; else by those in the image.

    The rest is as for :func:`max_pool2d`, but for the padding, which may be any.
    """
    window = (kernel, stride, padding, dilation, extra)
    return _sum_pool("average_pool2d", input, window, bool(count_include_pad), out, threads, stream)


def lp_pool2d(
    input: Any,
    kernel: int | Pair,
    *,
    p: int = 2,
    stride: int | Pair | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | Pair = 1,
    extra: int | Pair = 0,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Takes the ``p``-norm of every window, 0 outside the image. Else as :func:`average_pool2d`."""
    if isinstance(p, bool) or not isinstance(p, int) or not 1 <= p < 2**31:
        raise InputError(f"lp_pool2d: p: expected a whole number from 1, found {p!r}")
    window = (kernel, stride, padding, dilation, extra)
    return _sum_pool("lp_pool2d", input, window, p, out, threads, stream)


def _sum_pool(name, input, window, option, out, threads, stream):
    kernel, stride, padding, dilation, extra = window
    x = view(f"{name}: input", input, ndim=4)
    kernels = pair(f"{name}: kernel", kernel)
    shape = make_shape(
        name, _cpu.AveragePool2dShape, *x.shape, *kernels,
        *(kernels if stride is None else pair(f"{name}: stride", stride)),
        *four_paddings(f"{name}: padding", padding), *pair(f"{name}: dilation", dilation),
        *pair(f"{name}: extra", extra),
    )  # fmt: skip
    y = make_output(name, out, x, (*x.shape[:2], shape.out_h, shape.out_w))
    refuse_overlap(name, y, x)
    call_kernel(name, (x, y), (shape, option), threads, stream)
    return y.array
