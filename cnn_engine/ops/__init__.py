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

from .convolution import CONV2D_VARIANTS, conv2d, conv2d_blocked, conv_transpose2d
from .gemm import linear, linear_blocked, matmul
from .pointwise import lrn, normalize, pad2d, relu, softmax, tanh
from .pooling import average_pool2d, lp_pool2d, max_pool2d

__all__ = [
    "CONV2D_VARIANTS",
    "conv2d",
    "conv2d_blocked",
    "pad2d",
    "relu",
    "tanh",
    "normalize",
    "max_pool2d",
    "average_pool2d",
    "lp_pool2d",
    "lrn",
    "conv_transpose2d",
    "matmul",
    "linear_blocked",
    "linear",
    "softmax",
]
