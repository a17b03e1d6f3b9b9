"""conv2d in every variant, and its transpose."""

from __future__ import annotations

import math
from typing import Any

from .. import _cpu
from ..devices import arrays
from ..devices.arrays import CPU, view
from ..errors import InputError, UnsupportedError
from ..graph.network import Pair, pair
from ..kernels import convolution as kernels
from .call import (
    call_kernel,
    four_paddings,
    make_output,
    make_shape,
    make_workspace,
    refuse_overlap,
)
from .pointwise import pad2d

#: ``variant`` of :func:`conv2d` -> the kernels' name for it.
CONV2D_VARIANTS = kernels.NATIVE


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
    paddings = four_paddings("conv2d: padding", padding)
    shape = make(x.shape, paddings)
    y = make_output("conv2d", out, x, (x.shape[0], w.shape[0], shape.out_h, shape.out_w))
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
    refuse_overlap("conv2d", y, x, w, b)
    call_kernel(
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
    shape = make(x.shape, four_paddings(f"{name}: padding", padding))
    y = make_output(name, out, x, (x.shape[0], w.shape[0], shape.out_h, shape.out_w))
    r = None if residual is None else view(f"{name}: residual", residual, shape=y.shape)
    refuse_overlap(name, y, x, w, b, r)
    packed = arrays.empty_beside(x, (shape.packed_size,))
    call_kernel("conv2d_pack", (w, packed), (shape,), threads, stream)
    space = make_workspace(x, "conv2d_blocked_workspace", shape, threads)
    call_kernel(name, (x, packed, b, r, y, space), (shape, lowest, highest), threads, stream)
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
        return make_shape(name, _cpu.Conv2dShape, *size, *strides, *paddings, *dilations, groups)

    return x, w, b, make


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
    """Adds a filter to the output for every input element, as the gradient of :func:`conv2d` does.

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
    shape = make_shape(
        name, _cpu.ConvTranspose2dShape, *x.shape, filters, *w.shape[2:],
        *pair(f"{name}: stride", stride), *four_paddings(f"{name}: padding", padding),
        *pair(f"{name}: dilation", dilation), groups,
        *pair(f"{name}: output_padding", output_padding),
    )  # fmt: skip
    b = None if bias is None else view(f"{name}: bias", bias, shape=(filters,))
    y = make_output(name, out, x, (x.shape[0], filters, shape.out_h, shape.out_w))
    refuse_overlap(name, y, x, w, b)
    call_kernel(name, (x, w, b, y), (shape,), threads, stream)
    return y.array
