"""Convolutions and pools: images of one, two or three dimensions; padding by numbers or by rule."""

from __future__ import annotations

from ....errors import InputError
from ....operators.average_pool2d import AveragePool2d, AveragePool3d, LpPool2d, LpPool3d
from ....operators.conv2d import Conv2d, Conv3d
from ....operators.conv_transpose2d import ConvTranspose2d, ConvTranspose3d
from ....operators.max_pool2d import MaxPool2d, MaxPool3d
from ....operators.shaping import Reshape
from ..refusal import Refusal
from . import converts


def _rank(call) -> int:
    """Returns the number of image dimensions of input 0: 1 to 3."""
    rank = len(call.value(0).shape) - 2
    if not 1 <= rank <= 3:
        raise Refusal(
            "the number of dimensions",
            f"expected images of 1 to 3 dimensions, found {list(call.value(0).shape)}",
        )
    return rank


def _numbers(call, name: str, count: int, default: int) -> tuple[int, ...]:
    found = call.integers(name, (default,) * count)
    if len(found) != count:
        raise InputError(f"{name}: expected {count} numbers, found {list(found)}")
    if max(found) >= 2**31 or min(found) < -(2**31):
        raise InputError(f"{name}: expected 32-bit numbers, found {list(found)}")
    return found


def _padding(call, sizes, kernel, stride, dilation) -> tuple[int, ...]:
    """Returns the pads before all dimensions, then after all, by ``pads`` or ``auto_pad``."""
    rank = len(sizes)
    rule = call.text("auto_pad", "NOTSET")
    pads = _numbers(call, "pads", 2 * rank, 0)
    if rule in ("NOTSET", ""):
        return pads
    if rule == "VALID":
        return (0,) * (2 * rank)
    if rule not in ("SAME_UPPER", "SAME_LOWER"):
        raise Refusal("auto_pad", f"the rule {rule!r} is not known")
    before, after = [], []
    for size, taps, step, spread in zip(sizes, kernel, stride, dilation, strict=True):
        if step < 1:
            raise InputError(f"strides: expected at least 1, found {step}")
        total = max((-(-size // step) - 1) * step + spread * (taps - 1) + 1 - size, 0)
        less, more = total // 2, total - total // 2
        before.append(less if rule == "SAME_UPPER" else more)
        after.append(more if rule == "SAME_UPPER" else less)
    return (*before, *after)


def _flat(values: tuple[int, ...], fill: int) -> tuple[int, ...]:
    """Returns attributes of one dimension as those of images with one row."""
    if len(values) == 1:
        return (fill, *values)
    return (fill, values[0], fill, values[1]) if len(values) == 2 else values


def _as_image(call, name: str) -> str:
    """Returns [N, C, L] as [N, C, 1, L]."""
    n, c, length = call.value_of(name).shape
    return call.emit(Reshape((n, c, 1, length), allow_zero=True), [name])


def _finish_row(call, op, inputs, outputs: int = 1) -> None:
    """Emits ``op`` over images with one row, and takes that row away from what comes out."""
    names = [call.temporary() for _ in range(outputs)]
    call.emit(op, inputs, names)
    for index, name in enumerate(names):
        n, c, _, length = call.value_of(name).shape
        call.emit(Reshape((n, c, length), allow_zero=True), [name], [call.output(index)])


def _kernel_of_weight(call, rank: int, place: int = 1) -> tuple[int, ...]:
    weight = call.value(place).shape
    if len(weight) != rank + 2:
        raise InputError(f"expected a weight of {rank + 2} dimensions, found {list(weight)}")
    kernel = weight[2:]
    given = call.integers("kernel_shape", kernel)
    if given != kernel:
        raise InputError(f"kernel_shape: expected the weight's {list(kernel)}, found {list(given)}")
    return kernel


@converts("Conv")
def conv(call) -> None:
    rank = _rank(call)
    kernel = _kernel_of_weight(call, rank)
    stride, dilation = _numbers(call, "strides", rank, 1), _numbers(call, "dilations", rank, 1)
    padding = _padding(call, call.value(0).shape[2:], kernel, stride, dilation)
    groups = call.number("group", 1)
    call.refuse_others()
    if rank == 1:
        op = Conv2d(_flat(stride, 1), _flat(padding, 0), _flat(dilation, 1), groups)
        x, weight = _as_image(call, call.input(0)), _as_image(call, call.input(1))
        _finish_row(call, op, [x, weight, *call.inputs[2:]])
    else:
        record = Conv2d if rank == 2 else Conv3d
        call.finish(record(stride, padding, dilation, groups), call.inputs)


@converts("ConvTranspose")
def conv_transpose(call) -> None:
    rank = _rank(call)
    kernel = _kernel_of_weight(call, rank)
    stride, dilation = _numbers(call, "strides", rank, 1), _numbers(call, "dilations", rank, 1)
    added = _numbers(call, "output_padding", rank, 0)
    groups = call.number("group", 1)
    rule = call.text("auto_pad", "NOTSET")
    padding = _numbers(call, "pads", 2 * rank, 0)
    wanted = call.integers("output_shape")
    sizes = call.value(0).shape[2:]
    full = [
        (size - 1) * step + spread * (taps - 1) + 1 + extra
        for size, taps, step, spread, extra in zip(
            sizes, kernel, stride, dilation, added, strict=True
        )
    ]
    if wanted is not None:
        wanted = wanted[-rank:]
        if len(wanted) != rank:
            raise InputError(f"output_shape: expected {rank} numbers, found {list(wanted)}")
    elif rule in ("SAME_UPPER", "SAME_LOWER"):
        wanted = tuple(size * step for size, step in zip(sizes, stride, strict=True))
    if wanted is not None:
        totals = [whole - size for whole, size in zip(full, wanted, strict=True)]
        halves = [total // 2 for total in totals]
        rest = [total - half for total, half in zip(totals, halves, strict=True)]
        padding = (*halves, *rest) if rule == "SAME_UPPER" else (*rest, *halves)
    elif rule == "VALID":
        padding = (0,) * (2 * rank)
    elif rule not in ("NOTSET", ""):
        raise Refusal("auto_pad", f"the rule {rule!r} is not known")
    call.refuse_others()
    if rank == 1:
        op = ConvTranspose2d(
            _flat(stride, 1), _flat(padding, 0), _flat(added, 0), _flat(dilation, 1), groups
        )
        x, weight = _as_image(call, call.input(0)), _as_image(call, call.input(1))
        _finish_row(call, op, [x, weight, *call.inputs[2:]])
    else:
        record = ConvTranspose2d if rank == 2 else ConvTranspose3d
        call.finish(record(stride, padding, added, dilation, groups), call.inputs)


def _pool(call):
    """Returns (rank, kernel, stride, padding, dilation, what is added behind the padding).

    That is what a last window needs: with ceil_mode, and where the first one is larger than the padded image
    by less than a stride, which ONNX Runtime takes for a window, too.
    """
    rank = _rank(call)
    kernel = call.integers("kernel_shape")
    if kernel is None or len(kernel) != rank or max(kernel) >= 2**31:
        raise InputError(f"kernel_shape: expected {rank} numbers, found {kernel}")
    stride, dilation = _numbers(call, "strides", rank, 1), _numbers(call, "dilations", rank, 1)
    if min(*kernel, *stride, *dilation) < 1:
        raise InputError("expected kernels, strides and dilations of at least 1, found one below")
    sizes = call.value(0).shape[2:]
    padding = _padding(call, sizes, kernel, stride, dilation)
    extra, up = [0] * rank, call.number("ceil_mode", 0)
    for axis, size in enumerate(sizes):
        span = dilation[axis] * (kernel[axis] - 1) + 1
        free = size + padding[axis] + padding[rank + axis] - span
        last = -(-free // stride[axis]) if up or free < 0 else free // stride[axis]
        if up and last * stride[axis] >= size + padding[axis]:
            last -= 1  # a window that begins in the padding behind the image does not count
        extra[axis] = max(0, last * stride[axis] - free) if last >= 0 else 0
    return rank, kernel, stride, padding, dilation, tuple(extra)


@converts("MaxPool")
def max_pool(call) -> None:
    rank, kernel, stride, padding, dilation, extra = _pool(call)
    column = call.number("storage_order", 0)
    call.refuse_others()
    border = (
        *padding[:rank],
        *(pad + more for pad, more in zip(padding[rank:], extra, strict=True)),
    )
    indices = ("column" if column else "row") if call.wants(1) else None
    count = 2 if indices else 1
    if rank == 1:
        op = MaxPool2d(
            _flat(kernel, 1), _flat(stride, 1), _flat(border, 0), _flat(dilation, 1), indices
        )
        _finish_row(call, op, [_as_image(call, call.input(0))], count)
    else:
        record = MaxPool2d if rank == 2 else MaxPool3d
        call.finish(record(kernel, stride, border, dilation, indices), call.inputs, count)


def _averaging(call, flat, deep, **attributes) -> None:
    rank, kernel, stride, padding, dilation, extra = _pool(call)
    call.refuse_others()
    if rank == 1:
        op = flat(
            _flat(kernel, 1), _flat(stride, 1), _flat(padding, 0), _flat(dilation, 1),
            (0, *extra), **attributes,
        )  # fmt: skip
        _finish_row(call, op, [_as_image(call, call.input(0))])
    else:
        record = flat if rank == 2 else deep
        call.finish(record(kernel, stride, padding, dilation, extra, **attributes), call.inputs)


@converts("AveragePool")
def average_pool(call) -> None:
    counts = bool(call.number("count_include_pad", 0))
    _averaging(call, AveragePool2d, AveragePool3d, count_include_pad=counts)


@converts("LpPool")
def lp_pool(call) -> None:
    _averaging(call, LpPool2d, LpPool3d, p=call.number("p", 2))
