"""Kernels in Numba, as a user writes them, on the CPU and on CUDA."""

from __future__ import annotations

import numba
from numba import cuda


@numba.njit
def conv2d(x, weight, bias, y, shape):
    """The plain loop, of one group and without dilation; what Numba compiled is the callable itself."""
    for n in range(shape.n):
        for f in range(shape.k):
            for i in range(shape.out_h):
                for j in range(shape.out_w):
                    total = numba.float32(0.0)
                    if bias is not None:
                        total = bias[f]
                    for c in range(shape.c):
                        for u in range(shape.r):
                            row = i * shape.stride_h - shape.pad_top + u
                            if row < 0 or row >= shape.h:
                                continue
                            for v in range(shape.s):
                                column = j * shape.stride_w - shape.pad_left + v
                                if 0 <= column < shape.w:
                                    total += x[n, c, row, column] * weight[f, c, u, v]
                    y[n, f, i, j] = total


@cuda.jit
def relu_kernel(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], 0.0)


def relu(x, y, shape, stream=None):
    """Writes max(x, 0) to ``y``; on CUDA both are CuPy's."""
    queue = cuda.external_stream(stream) if stream else 0
    relu_kernel[-(-shape.count // 128), 128, queue](x.reshape(-1), y.reshape(-1))
