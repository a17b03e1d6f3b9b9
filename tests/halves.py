"""Arrays as they lie in memory in 16 bits, float16 or bfloat16, and who is told of what does not fit."""

from __future__ import annotations

import numpy as np

from cnn_engine import _cpu

STORED = ("float32", "float16", "bfloat16")
NO_ONE = _cpu.Overflow(0, 0)


def kind(stored: str):
    """Returns the compiled functions' name of a type."""
    return getattr(_cpu.Stored, stored)


def laid(array: np.ndarray, stored: str) -> np.ndarray:
    """Returns the elements of ``array`` as they lie in memory: rounded to the nearest, ties to even."""
    array = np.ascontiguousarray(array, np.float32)
    if stored == "float32":
        return array
    if stored == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    bits = array.view(np.uint32)
    near = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, near).astype(np.uint16)


def wide(array: np.ndarray, stored: str) -> np.ndarray:
    """Returns what lies in memory as float32."""
    if stored == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def rounded(array: np.ndarray, stored: str) -> np.ndarray:
    """Returns ``array`` as it comes back from memory."""
    return wide(laid(array, stored), stored)


def put(device, array: np.ndarray, stored: str):
    """Returns an array on the device as it lies in memory there."""
    there = laid(array, stored)
    return device.put(there, there.dtype)


def get(device, array, stored: str) -> np.ndarray:
    """Returns what lies in memory of the device, as float32."""
    return wide(device.get(array), stored)
