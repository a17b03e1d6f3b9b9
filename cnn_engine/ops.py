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
from .engine.kernels import convolution
from .errors import InputError, UnsupportedError
from .graph.network import Pair, pair
from .operators.matmul import Matmul
from .operators.operator import Value

#: ``variant`` of :func:`conv2d` -> the kernels' name for it.
CONV2D_VARIANTS = convolution.NATIVE


def conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: int | Pair = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
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
        weight: [K, C / groups, R, S].
        bias: [K], or None.
        stride, dilation: of rows and columns.
        padding: zeros around the image: one number, rows and columns, or (above, left, below, right).
        groups: filters and channels are in so many groups that do not see each other.
        variant: ``"if"`` tests the image's bounds in the innermost loop; ``"pad"`` first writes a padded
            copy of its input and runs branch-free; ``"tiled"`` (CUDA, one group, without ``reduction``)
            sums in registers over tiles in shared memory; ``"blocked"`` (without ``reduction``) is
            :func:`conv2d_blocked`.
        reduction: let several lanes share one output's sum.
        out: [N, K, OH, OW] with OH = (H + above + below - dilation * (R - 1) - 1) // stride + 1.
        workspace: where ``"pad"`` writes its copy, [N, C, H + above + below, W + left + right].
        threads: CPU threads; None: all.
        stream: see the module.

    Returns:
        ``out``.
    """
    if variant not in (*CONV2D_VARIANTS, "blocked"):
        raise InputError(
            f"conv2d: variant: expected one of {', '.join(CONV2D_VARIANTS)}, blocked, found {variant!r}"
        )
    if variant == "blocked" and not reduction:
        return conv2d_blocked(
            input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups,
            out=out, threads=threads, stream=stream,
        )  # fmt: skip
    x, w, b, make = _conv2d_views("conv2d", input, weight, bias, stride, dilation, groups)
    paddings = _paddings("conv2d: padding", padding)
    shape = make(x.shape, paddings)
    y = _output("conv2d", out, x, (x.shape[0], w.shape[0], shape.out_h, shape.out_w))
    if variant == "pad" and any(paddings):
        top, left, bottom, right = paddings
        padded = (*x.shape[:2], x.shape[2] + top + bottom, x.shape[3] + left + right)
        if workspace is None:
            workspace = arrays.empty_beside(x, padded).array
        pad2d(input, paddings, out=workspace, threads=threads, stream=stream)
        x = view("conv2d: workspace", workspace, shape=padded)
        shape = make(padded, (0, 0, 0, 0))
    if variant in ("tiled", "blocked") and (x.device == CPU or reduction):
        where = "CUDA with reduction" if x.device != CPU else "the CPU"
        wanted = (
            "no reduction, found one"
            if variant == "blocked"
            else f"CUDA without reduction, found {where}"
        )
        raise UnsupportedError(f"conv2d: variant {variant}: expected {wanted}")
    _refuse_overlap("conv2d", y, x, w, b)
    _call(
        "conv2d", (x, w, b, y), (shape, CONV2D_VARIANTS[variant], bool(reduction)), threads, stream
    )
    return y.array


def conv2d_blocked(
    input: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    *,
    stride: int | Pair = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    lowest: float = -math.inf,
    highest: float = math.inf,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Computes ``min(max(conv2d(...) + residual, lowest), highest)`` as a matrix product in blocks.

    Weights are packed in each call; an engine packs them once.

    Args:
        residual: as the output, or None.
        lowest, highest: what the result is clamped to; 0 and infinity: ReLU. NaN stays NaN.

    The rest is as for :func:`conv2d`.
    """
    name = "conv2d_blocked"
    if not lowest <= highest:
        raise InputError(f"{name}: expected lowest <= highest, found {lowest} and {highest}")
    x, w, b, make = _conv2d_views(name, input, weight, bias, stride, dilation, groups)
    shape = make(x.shape, _paddings(f"{name}: padding", padding))
    y = _output(name, out, x, (x.shape[0], w.shape[0], shape.out_h, shape.out_w))
    r = None if residual is None else view(f"{name}: residual", residual, shape=y.shape)
    _refuse_overlap(name, y, x, w, b, r)
    packed = arrays.empty_beside(x, (shape.packed_size,))
    _call("conv2d_pack", (w, packed), (shape,), threads, stream)
    space = _workspace(x, "conv2d_blocked_workspace", shape, threads)
    _call(name, (x, packed, b, r, y, space), (shape, lowest, highest), threads, stream)
    return y.array


def _conv2d_views(name, input, weight, bias, stride, dilation, groups):
    """Returns views of the tensors, and what makes a shape from the input's dimensions and paddings."""
    x = view(f"{name}: input", input, ndim=4)
    w = view(f"{name}: weight", weight, ndim=4)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise InputError(f"{name}: groups: expected a whole number from 1, found {groups!r}")
    if w.shape[0] % groups:
        raise InputError(f"{name}: weight: expected filters in {groups} groups, found {w.shape[0]}")
    if w.shape[1] * groups != x.shape[1]:
        among = "" if groups == 1 else f" of {x.shape[1]} in {groups} groups"
        raise InputError(
            f"{name}: weight: expected {x.shape[1] // groups} input channels{among}, "
            f"found {w.shape[1]} (shape {list(w.shape)})"
        )
    strides, dilations = pair(f"{name}: stride", stride), pair(f"{name}: dilation", dilation)
    b = None if bias is None else view(f"{name}: bias", bias, shape=(w.shape[0],))

    def make(dimensions: tuple[int, ...], paddings: tuple[int, ...]):
        size = (*dimensions, w.shape[0], *w.shape[2:])
        return _shape(name, _cpu.Conv2dShape, *size, *strides, *paddings, *dilations, groups)

    return x, w, b, make


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
    shape = _shape("pad2d", _cpu.Pad2dShape, *x.shape, *_paddings("pad2d: padding", padding))
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
        padding: less than the window: one number, rows and columns, or (above, left, below, right); places
            outside the image do not take part.
        dilation: rows and columns from one place of a window to the next.
        out: [N, C, OH, OW] with OH = (H + above + below - dilation * (kernel - 1) - 1) // stride + 1.
    """
    x = view("max_pool2d: input", input, ndim=4)
    kernels = pair("max_pool2d: kernel", kernel)
    strides = kernels if stride is None else pair("max_pool2d: stride", stride)
    paddings = _paddings("max_pool2d: padding", padding)
    dilations = pair("max_pool2d: dilation", dilation)
    shape = _shape(
        "max_pool2d", _cpu.MaxPool2dShape, *x.shape, *kernels, *strides, *paddings, *dilations
    )
    y = _output("max_pool2d", out, x, (*x.shape[:2], shape.out_h, shape.out_w))
    _refuse_overlap("max_pool2d", y, x)
    _call("max_pool2d", (x, y), (shape,), threads, stream)
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
        count_include_pad: divide by the places in the image and its padding; else by those in the image.

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
    shape = _shape(
        name, _cpu.AveragePool2dShape, *x.shape, *kernels,
        *(kernels if stride is None else pair(f"{name}: stride", stride)),
        *_paddings(f"{name}: padding", padding), *pair(f"{name}: dilation", dilation),
        *pair(f"{name}: extra", extra),
    )  # fmt: skip
    y = _output(name, out, x, (*x.shape[:2], shape.out_h, shape.out_w))
    _refuse_overlap(name, y, x)
    _call(name, (x, y), (shape, option), threads, stream)
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
    shape = _shape("lrn", _cpu.LrnShape, *x.shape[:2], math.prod(x.shape[2:]), size, alpha, beta, k)
    y = _output("lrn", out, x, x.shape)
    _refuse_overlap("lrn", y, x)
    _call("lrn", (x, y), (shape,), threads, stream)
    return y.array


def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: int | Pair = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Writes a filter for every input element, what :func:`conv2d`'s gradient does.

    Args:
        input: [N, C, H, W].
        weight: [C, K / groups, R, S].
        bias: [K], or None.
        padding: taken away from the output: one number, rows and columns, or (above, left, below, right).
        output_padding: rows added below and columns on the right.
        out: [N, K, OH, OW] with OH = (H - 1) * stride + dilation * (R - 1) + 1 + added - taken away.
    """
    name = "conv_transpose2d"
    x = view(f"{name}: input", input, ndim=4)
    w = view(f"{name}: weight", weight, ndim=4)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise InputError(f"{name}: groups: expected a whole number from 1, found {groups!r}")
    if w.shape[0] != x.shape[1] or x.shape[1] % groups:
        raise InputError(
            f"{name}: weight: expected {x.shape[1]} channels in {groups} groups, found {w.shape[0]}"
        )
    filters = w.shape[1] * groups
    shape = _shape(
        name, _cpu.ConvTranspose2dShape, *x.shape, filters, *w.shape[2:],
        *pair(f"{name}: stride", stride), *_paddings(f"{name}: padding", padding),
        *pair(f"{name}: dilation", dilation), groups,
        *pair(f"{name}: output_padding", output_padding),
    )  # fmt: skip
    b = None if bias is None else view(f"{name}: bias", bias, shape=(filters,))
    y = _output(name, out, x, (x.shape[0], filters, shape.out_h, shape.out_w))
    _refuse_overlap(name, y, x, w, b)
    _call(name, (x, w, b, y), (shape,), threads, stream)
    return y.array


def matmul(
    a: Any,
    b: Any,
    bias: Any = None,
    *,
    transpose: tuple[bool, bool] = (False, False),
    blocked: bool = True,
    lowest: float = -math.inf,
    highest: float = math.inf,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Computes ``min(max(a @ b + bias, lowest), highest)`` by NumPy's rules for ``@``.

    Args:
        a, b: [..., I, F] and [..., F, J], batch dimensions broadcasting; or vectors.
        bias: [J], or None.
        transpose: whether a's, and b's, last two dimensions are exchanged first.
        blocked: sum in tiles; else each element by itself, in order.
    """
    x, y = view("matmul: a", a), view("matmul: b", b)
    shapes = [
        (*v.shape[:-2], *v.shape[:-3:-1]) if exchanged and len(v.shape) > 1 else v.shape
        for v, exchanged in zip((x, y), transpose, strict=True)
    ]
    values = [Value(name, shape) for name, shape in zip("ab", shapes, strict=True)]
    try:
        ((result, _),) = Matmul().infer(values)
    except InputError as error:
        raise InputError(f"matmul: {error}") from None
    numbers = Matmul.numbers(x.shape, y.shape, transpose)
    if numbers is None:
        raise UnsupportedError(
            f"matmul: expected at most 4 batch dimensions that cannot be taken together, "
            f"found {list(x.shape)} and {list(y.shape)}"
        )
    shape = _shape("matmul", _cpu.MatmulShape, *numbers)
    z = _output("matmul", out, x, result)
    v = None if bias is None else view("matmul: bias", bias, shape=(numbers[1],))
    _refuse_overlap("matmul", z, x, y, v)
    if blocked:
        space = _workspace(x, "matmul_blocked_workspace", shape, threads)
        _call("matmul_blocked", (x, y, v, z, space), (shape, lowest, highest), threads, stream)
    else:
        _call("matmul", (x, y, v, z), (shape, lowest, highest), threads, stream)
    return z.array


def linear_blocked(
    input: Any,
    weight: Any,
    bias: Any = None,
    *,
    lowest: float = -math.inf,
    highest: float = math.inf,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Computes :func:`linear` in tiles, clamped. Packs the weights in each call; an engine does it once."""
    name = "linear_blocked"
    x, w, b, y, shape = _linear_views(name, input, weight, bias, out)
    packed = arrays.empty_beside(x, (shape.packed_size,))
    _call("linear_pack", (w, packed), (shape,), threads, stream)
    space = _workspace(x, "linear_blocked_workspace", shape, threads)
    _call(name, (x, packed, b, y, space), (shape, lowest, highest), threads, stream)
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
    x, w, b, y, shape = _linear_views("linear", input, weight, bias, out)
    _call("linear", (x, w, b, y), (shape, bool(reduction)), threads, stream)
    return y.array


def _linear_views(name, input, weight, bias, out):
    x = view(f"{name}: input", input, ndim=2)
    w = view(f"{name}: weight", weight, ndim=2)
    if w.shape[1] != x.shape[1]:
        raise InputError(
            f"{name}: weight: expected {x.shape[1]} input features, found {w.shape[1]} "
            f"(shape {list(w.shape)})"
        )
    shape = _shape(name, _cpu.LinearShape, *x.shape, w.shape[0])
    b = None if bias is None else view(f"{name}: bias", bias, shape=(w.shape[0],))
    y = _output(name, out, x, (x.shape[0], w.shape[0]))
    _refuse_overlap(name, y, x, w, b)
    return x, w, b, y, shape


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


def _paddings(name: str, value: int | tuple[int, ...]) -> tuple[int, int, int, int]:
    """Returns ``value`` as (above, left, below, right)."""
    if isinstance(value, (tuple, list)) and len(value) == 4:
        return (*pair(name, value[:2]), *pair(name, value[2:]))
    rows, columns = pair(name, value)
    return rows, columns, rows, columns


def _workspace(x: View, query: str, shape: Any, threads: int | None) -> View | None:
    """Returns memory beside ``x``, of as many bytes as the device's ``query`` asks for."""
    module = _cpu if x.device == CPU else cuda_module.load()
    nbytes = getattr(module, query)(shape, thread_counts.check(threads, f"{query}: threads"))
    return arrays.empty_beside(x, (-(-nbytes // 4),)) if nbytes else None


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
