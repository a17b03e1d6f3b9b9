"""The compiled kernels, called on arrays of either device: what the engine does, without the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module

DIMS = 8

#: What follows a sum, as the compiled functions take it: a function and its two numbers.
NONE = _cpu.UnaryFunction.clip, -math.inf, math.inf
RELU = _cpu.UnaryFunction.relu, 0, 0


def dims(shape: tuple[int, ...]) -> list[int]:
    """Returns ``shape`` with ones in front, as the kernels' shapes take it."""
    return [1] * (DIMS - len(shape)) + list(shape)


def strides(array: np.ndarray, shape: tuple[int, ...]) -> list[int]:
    """Returns the steps, in elements, of ``array`` broadcast to ``shape``."""
    wide = np.broadcast_to(array, shape)
    found = [0 if n == 1 else s // array.itemsize for n, s in zip(shape, wide.strides, strict=True)]
    return [0] * (DIMS - len(shape)) + found


def address(array: Any) -> int:
    """Returns where the element at index 0 of an array of NumPy or CuPy lies."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def call(device, name: str, *arguments: Any, threads: int = 2) -> None:
    """Calls a kernel on ``device``; arrays are passed as addresses, None as 0."""
    passed = [
        0 if a is None else address(a) if hasattr(a, "dtype") and hasattr(a, "strides") else a
        for a in arguments
    ]
    if device.kind == "cpu":
        getattr(_cpu, name)(*passed, threads)
    else:
        getattr(cuda_module.load(), name)(*passed, 0)


NO_FLAG = _cpu.Overflow(0, 0)


def images(array: Any, pitch: int | None = None, storage_dtype: str = "float32") -> tuple:
    """Returns an array [..., pitch], or None, as kernels take images."""
    if pitch is None:
        pitch = 0 if array is None else array.shape[-1]
    return 0 if array is None else array, pitch, getattr(_cpu.ElementType, storage_dtype)


def epilogue(
    bias: Any = 0,
    activation: tuple = NONE,
    overflow: Any = NO_FLAG,
    residual: tuple = images(None),
) -> tuple:
    """Returns an Epilogue as it is passed; the activation is a function and its two numbers."""
    return bias, *residual, _cpu.Activation(*activation), overflow


def values(array: Any, storage_dtype: str = "float32") -> tuple:
    """Returns an array as kernels take values of one type."""
    return array, getattr(_cpu.ElementType, storage_dtype)


def prologue(
    scale: Any = 0, shift: Any = 0, per_image: bool = False, floor: float = -math.inf
) -> tuple:
    """Returns a Prologue as it is passed."""
    return scale, shift, per_image, floor


def launch(workspace: Any = 0, ready: int = 0, holds: bool = False, rank: int = 0) -> tuple:
    """Returns a Launch as it is passed, without the stream."""
    return workspace, ready, holds, rank


def packed(device, name: str, weights: Sequence[np.ndarray | None], *how: Any) -> Any:
    """Returns the weights of the kernel ``name`` of a GPU as it packs them."""
    nbytes = getattr(cuda_module.load(), f"{name}_packed")(*how, 0)
    found = device.library.full(nbytes, 0xFF, np.uint8)
    call(device, f"{name}_pack", *map(device.put, weights), found, *how)
    return found


def channels_last(x: np.ndarray, more: int = 0) -> np.ndarray:
    """Returns images [N, C, H, W] as [N, H, W, C + more], with NaN behind the channels."""
    n, c, h, w = x.shape
    images = np.full((n, h, w, c + more), np.nan, np.float32)
    images[..., :c] = x.transpose(0, 2, 3, 1)
    return images


def channels_first(y: np.ndarray, filters: int) -> np.ndarray:
    """Returns images [N, H, W, K + more], behind whose filters only 7 may be, as [N, K, H, W]."""
    assert (y[..., filters:] == 7).all(), "written behind the filters"
    return np.ascontiguousarray(y[..., :filters].transpose(0, 3, 1, 2))


def guarded(device, shape: tuple[int, ...], dtype):
    """Returns a poisoned array of any type to write into, and the memory around it."""
    dtype = np.dtype(dtype)
    size = math.prod(shape)
    memory = device.library.full((size + 2 * device.GUARD) * dtype.itemsize, 0xA5, np.uint8)
    band = device.GUARD * dtype.itemsize
    return memory[band : band + size * dtype.itemsize].view(dtype).reshape(shape), memory


def check_guards(device, memory, dtype) -> None:
    """Asserts that nothing was written around the array that :func:`guarded` returned."""
    band = device.GUARD * np.dtype(dtype).itemsize
    values = device.get(memory)
    assert (values[:band] == 0xA5).all(), "written before the output"
    assert (values[-band:] == 0xA5).all(), "written after the output"


#: Numbers at which functions go wrong.
SPECIAL = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1.2e-38, 3.4e38, -3.4e38, 88.8, -88.8, 104.0,
     -104.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 3.0, -3.0, 20.0, -20.0, 1e-8, -1e-8],
    np.float32,
)  # fmt: skip


def rounded(wanted: np.ndarray) -> np.ndarray:
    """Returns float64 numbers with infinities in the place of what float32 has no number for."""
    highest = np.finfo(np.float32).max
    return np.where(np.abs(wanted) > highest, np.copysign(np.inf, wanted), wanted)
