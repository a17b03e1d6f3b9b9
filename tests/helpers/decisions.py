"""What the compiled functions decide of a grid of shapes for a GPU: whether kernels fit and pay; splits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

from cnn_engine import _cpu

HALVES = [_cpu.ElementType.float16, _cpu.ElementType.bfloat16]
ALL = [_cpu.ElementType.float32, _cpu.ElementType.tf32, *HALVES]


def convolution(n, c, side, k, r=1, stride=1, groups=1, pad=None) -> Any:
    pad = r // 2 if pad is None else pad
    return _cpu.Conv2dShape(
        n, c, side, side, k, r, r, stride, stride, pad, pad, pad, pad, 1, 1, groups
    )  # fmt: skip


def calls() -> Iterator[tuple[str, tuple]]:
    """Yields the name of a function and its arguments before the GPU."""
    for n, c, side, r, how in product((1, 2, 20), (64, 256, 512), (7, 14, 56), (1, 3), ALL):
        yield "conv2d_nhwc_wgmma_takes", (convolution(n, c, side, c, r), how)
    for n, c, side, how in product((1, 2, 5, 20), (64, 128, 512), (14, 28, 56, 112), HALVES):
        yield "conv2d_nhwc_wgmma_pool_takes", (convolution(n, c, side, c, 3), how)
    for n, c, side, beside, how in product((1, 2, 20), (64, 256), (7, 14, 56), (True, False), ALL):
        shapes = convolution(n, c, side, 4 * c), convolution(n, 2 * c, side, 4 * c)
        pair = (shapes[0], convolution(n, c, side, c)) if beside else shapes
        yield "conv2d_nhwc_wgmma_pair_takes", (*pair, beside, how)
    for n, side, r, how in product((1, 20), (32, 224), (3, 7), ALL):
        yield "conv2d_nhwc_wgmma_planar_takes", (convolution(n, 3, side, 64, r, 2), how)
    for n, c, side, r, stride in product(
        (1, 2, 5, 20), (96, 240, 672), (7, 14, 28), (3, 5, 7), (1, 2)
    ):
        own = convolution(n, c, side, c, r, stride, c)
        yield "expand_depthwise_takes", (own, 40)
        yield "depthwise_means_takes", (own,)
        yield "depthwise_norm_takes", (own, _cpu.ElementType.float32)
        for expands, adds in product((True, False), (True, False)):
            channels = 40 if expands else c
            yield "inverted_residual_takes", (own, channels, channels, expands, adds)
    for n, side, before in product((1, 2, 3, 8), (4, 7, 14, 28, 32), (64, 256, 544, 1024)):
        yield "dense_layer_takes", (convolution(n, 128, side, 32, 3), before, 128)
    for n, c, side, reduced in product((1, 2, 4, 20), (64, 128, 256), (7, 14, 28, 56), (0, 64)):
        yield "bottleneck_takes", (convolution(n, c, side, c, 3), 4 * c, reduced)
    for n, c, side, how in product((1, 2, 5, 20), (96, 192, 384), (7, 14, 28, 56), ALL):
        yield "mlp_takes", (convolution(n, c, side, 4 * c), c, how)
    for positions, channels, outputs, how in product(
        (16, 49, 64), (64, 512, 1280, 2048), (10, 1000, 2048, 4096), ALL
    ):
        yield "mean_linear_takes", (_cpu.AxisShape(1, positions, channels), outputs, how)
    for positions, channels, hidden in product((49, 196, 256, 784), (96, 480, 1152), (4, 24, 120)):
        yield "squeeze_excite_scales", (_cpu.AxisShape(2, positions, channels), hidden)
    relu = _cpu.UnaryFunction.relu, 0.0, 0.0
    for n, *sizes in product((1, 8, 32, 33), (120, 400, 9216), (84, 512), (10, 1000)):
        layers = [_cpu.RowLayer(*pair, *relu) for pair in pairwise(sizes)]
        yield "linear_layers_takes", (_cpu.RowLayers(n, True, *layers),)
    for n, c, side, k, r in product((1, 8, 32), (3, 64), (7, 28), (4, 32, 100, 256), (1, 3)):
        yield "conv2d_blocked_workspace", (convolution(n, c, side, k, r),)
    for n, features, outputs in product((1, 32, 500), (100, 2048, 9216), (10, 1000)):
        yield "linear_blocked_workspace", (_cpu.LinearShape(n, features, outputs),)


def decided(module: Any, gpu: Any) -> dict[str, list[int]]:
    """Returns every function's answers, in order, for a GPU."""
    found: dict[str, list[int]] = {}
    for name, arguments in calls():
        found.setdefault(name, []).append(int(getattr(module, name)(*arguments, gpu)))
    return found
