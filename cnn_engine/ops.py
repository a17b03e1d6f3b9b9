"""The operators, on NumPy arrays (CPU) or arrays of a CUDA device.

Tensors are NCHW, C-contiguous, float32 unless said. All arrays of a call are on one device. CUDA work is
queued on ``stream`` (a handle, or CuPy's or PyTorch's stream object; None: the stream that the input's
library works on at present) and not waited for. Nothing is copied behind the caller's back: an array that
does not fit is refused. ``out`` takes the result; without it a new array of the input's library is made.

Every function raises :class:`~cnn_engine.errors.InputError` for arrays, shapes and options that do not fit,
:class:`~cnn_engine.errors.UnsupportedError` where this installation or device lacks what is asked for, and
:class:`~cnn_engine.errors.DeviceError` when CUDA refuses a launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from . import _cpu
from .devices import arrays, cuda_module
from .devices import threads as thread_counts
from .devices.arrays import CPU, View, view
from .errors import InputError, UnsupportedError
from .graph.network import Pair, pair

#: ``variant`` of :func:`conv2d` -> the kernels' name for it.
CONV2D_VARIANTS = {
    "if": _cpu.Conv2dVariant.direct,
    "pad": _cpu.Conv2dVariant.pad,
    "tiled": _cpu.Conv2dVariant.tiled,
}


def conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    variant: str = "if",
    reduction: bool = False,
    out: Any = None,
    workspace: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Cross-correlates images with filters.

    Args:
        input: [N, C, H, W].
        weight: [K, C, R, S].
        bias: [K], or None.
        stride, padding: of rows and columns.
        variant: ``"if"`` tests the image's bounds in the innermost loop; ``"pad"`` first writes a padded
            copy of its input and runs branch-free; ``"tiled"`` (CUDA, without ``reduction``) sums in
            registers over tiles in shared memory.
        reduction: let several lanes share one output's sum.
        out: [N, K, OH, OW] with OH = (H + 2 * padding - R) // stride + 1.
        workspace: where ``"pad"`` writes its copy, [N, C, H + 2 * padding, W + 2 * padding].
        threads: CPU threads; None: all.
        stream: see the module.

    Returns:
        ``out``.
    """
    if variant not in CONV2D_VARIANTS:
        raise InputError(
            f"conv2d: variant: expected one of {', '.join(CONV2D_VARIANTS)}, found {variant!r}"
        )
    x = view("conv2d: input", input, ndim=4)
    w = view("conv2d: weight", weight, ndim=4)
    if w.shape[1] != x.shape[1]:
        raise InputError(
            f"conv2d: weight: expected {x.shape[1]} input channels, found {w.shape[1]} "
            f"(shape {list(w.shape)})"
        )
    strides, paddings = pair("conv2d: stride", stride), pair("conv2d: padding", padding)
    size = (*x.shape, w.shape[0], *w.shape[2:])
    shape = _shape("conv2d", _cpu.Conv2dShape, *size, *strides, *paddings)
    b = None if bias is None else view("conv2d: bias", bias, shape=(w.shape[0],))
    y = _output("conv2d", out, x, (x.shape[0], w.shape[0], shape.out_h, shape.out_w))
    if variant == "pad" and paddings != (0, 0):
        padded = (
            x.shape[0],
            x.shape[1],
            x.shape[2] + 2 * paddings[0],
            x.shape[3] + 2 * paddings[1],
        )
        if workspace is None:
            workspace = arrays.empty_beside(x, padded).array
        pad2d(input, paddings, out=workspace, threads=threads, stream=stream)
        x = view("conv2d: workspace", workspace, shape=padded)
        size = (*padded, *size[4:])
        shape = _shape("conv2d", _cpu.Conv2dShape, *size, *strides, 0, 0)
    if variant == "tiled" and (x.device == CPU or reduction):
        where = "the CPU" if x.device == CPU else "CUDA with reduction"
        raise UnsupportedError(
            f"conv2d: variant tiled: expected CUDA without reduction, found {where}"
        )
    _refuse_overlap("conv2d", y, x, w, b)
    _call(
        "conv2d", (x, w, b, y), (shape, CONV2D_VARIANTS[variant], bool(reduction)), threads, stream
    )
    return y.array


def pad2d(
    input: Any,
    padding: int | Pair,
    *,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Puts a border of zeros around ``input`` [N, C, H, W]; ``out`` is [N, C, H + 2 PH, W + 2 PW]."""
    x = view("pad2d: input", input, ndim=4)
    shape = _shape("pad2d", _cpu.Pad2dShape, *x.shape, *pair("pad2d: padding", padding))
    y = _output("pad2d", out, x, (*x.shape[:2], shape.out_h, shape.out_w))
    _refuse_overlap("pad2d", y, x)
    _call("pad2d", (x, y), (shape,), threads, stream)
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
    shape = _shape("normalize", _cpu.ElementwiseShape, math.prod(x.shape), 1)
    y = _output("normalize", out, x, x.shape)
    _refuse_overlap("normalize", y, x)
    _call("normalize", (x, y), (shape, scale, offset), threads, stream)
    return y.array


def max_pool2d(
    input: Any,
    kernel: int | Pair,
    *,
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
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
        padding: at most half the window; places outside the image do not take part.
        out: [N, C, OH, OW] with OH = (H + 2 * padding - kernel) // stride + 1.
    """
    x = view("max_pool2d: input", input, ndim=4)
    kernels = pair("max_pool2d: kernel", kernel)
    strides = kernels if stride is None else pair("max_pool2d: stride", stride)
    paddings = pair("max_pool2d: padding", padding)
    shape = _shape("max_pool2d", _cpu.MaxPool2dShape, *x.shape, *kernels, *strides, *paddings)
    y = _output("max_pool2d", out, x, (*x.shape[:2], shape.out_h, shape.out_w))
    _refuse_overlap("max_pool2d", y, x)
    _call("max_pool2d", (x, y), (shape,), threads, stream)
    return y.array


def linear(
    input: Any,
    weight: Any,
    bias: Any = None,
    *,
    reduction: bool = False,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Computes ``input @ weight.T + bias`` for ``input`` [N, F], ``weight`` [M, F], ``bias`` [M]; [N, M]."""
    x = view("linear: input", input, ndim=2)
    w = view("linear: weight", weight, ndim=2)
    if w.shape[1] != x.shape[1]:
        raise InputError(
            f"linear: weight: expected {x.shape[1]} input features, found {w.shape[1]} "
            f"(shape {list(w.shape)})"
        )
    shape = _shape("linear", _cpu.LinearShape, *x.shape, w.shape[0])
    b = None if bias is None else view("linear: bias", bias, shape=(w.shape[0],))
    y = _output("linear", out, x, (x.shape[0], w.shape[0]))
    _refuse_overlap("linear", y, x, w, b)
    _call("linear", (x, w, b, y), (shape, bool(reduction)), threads, stream)
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
    shape = _shape("softmax", _cpu.SoftmaxShape, *x.shape)
    y = _output("softmax", out, x, x.shape)
    if y.address != x.address:
        _refuse_overlap("softmax", y, x)
    _call("softmax", (x, y), (shape, bool(reduction)), threads, stream)
    return y.array


def _elementwise(name: str, input: Any, out: Any, threads: int | None, stream: Any) -> Any:
    x = view(f"{name}: input", input)
    shape = _shape(name, _cpu.ElementwiseShape, math.prod(x.shape), 4)
    y = _output(name, out, x, x.shape)
    if y.address != x.address:
        _refuse_overlap(name, y, x)
    _call(name, (x, y), (shape,), threads, stream)
    return y.array


def _shape(name: str, make: Callable, *numbers: int) -> Any:
    try:
        return make(*numbers)
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None
    except TypeError:  # what pybind11 raises for a number past 32 bits
        raise InputError(
            f"{name}: expected dimensions and options below 2^31, found {list(numbers)}"
        ) from None


def _output(name: str, out: Any, x: View, shape: tuple[int, ...]) -> View:
    if out is None:
        return arrays.empty_beside(x, shape)
    return view(f"{name}: out", out, shape=shape, writable=True)


def _refuse_overlap(name: str, y: View, *inputs: View | None) -> None:
    if any(x is not None and y.overlaps(x) for x in inputs):
        raise InputError(f"{name}: out: expected memory of its own, found it overlaps an input")


def _call(
    name: str,
    tensors: tuple[View | None, ...],
    options: tuple,
    threads: int | None,
    stream: Any,
) -> None:
    """Calls the kernels of the device that holds all of ``tensors``."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1:
        places = sorted("the CPU" if d == CPU else f"cuda:{d}" for d in devices)
        raise InputError(f"{name}: expected all arrays on one device, found {' and '.join(places)}")
    addresses = [0 if tensor is None else tensor.address for tensor in tensors]
    device = devices.pop()
    count = thread_counts.check(threads, f"{name}: threads")
    if device == CPU:
        getattr(_cpu, name)(*addresses, *options, count)
        return
    handle = arrays.current_stream(tensors[0]) if stream is None else arrays.stream_handle(stream)
    _cuda = cuda_module.load()
    with _on_device(_cuda, device):
        try:
            getattr(_cuda, name)(*addresses, *options, handle)
        except ValueError as error:  # the kernel cannot take this shape, and says why
            raise UnsupportedError(f"{name}: {error}") from None


@contextmanager
def _on_device(_cuda: Any, device: int):
    previous = _cuda.get_device()
    if device == previous:
        yield
        return
    _cuda.set_device(device)
    try:
        yield
    finally:
        _cuda.set_device(previous)
