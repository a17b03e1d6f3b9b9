"""Arrays as they lie in memory in 16 bits, float16 or bfloat16, and the flag of what does not fit."""

from __future__ import annotations

import numpy as np
from native import check_guards, guarded

from cnn_engine import _cpu

HALVES = ("float16", "bfloat16")
STORED = ("float32", *HALVES)
NO_FLAG = _cpu.Overflow(0, 0)


def kind(storage_dtype: str):
    """Returns the compiled functions' name of a type."""
    return getattr(_cpu.ElementType, storage_dtype)


def laid(array: np.ndarray, storage_dtype: str) -> np.ndarray:
    """Returns the elements of ``array`` as they lie in memory: rounded to the nearest, ties to even."""
    array = np.ascontiguousarray(array, np.float32)
    if storage_dtype == "float32":
        return array
    if storage_dtype == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    bits = array.view(np.uint32)
    near = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, near).astype(np.uint16)


def wide(array: np.ndarray, storage_dtype: str) -> np.ndarray:
    """Returns what lies in memory as float32."""
    if storage_dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def rounded(array: np.ndarray, storage_dtype: str) -> np.ndarray:
    """Returns ``array`` as it comes back from memory."""
    return wide(laid(array, storage_dtype), storage_dtype)


def put(device, array: np.ndarray | None, storage_dtype: str):
    """Returns an array on the device as it lies in memory there; None stays None."""
    if array is None:
        return None
    there = laid(array, storage_dtype)
    return device.put(there, there.dtype)


def get(device, array, storage_dtype: str) -> np.ndarray:
    """Returns what lies in memory of the device, as float32."""
    return wide(device.get(array), storage_dtype)


class Output:
    """A poisoned ``array`` of the device to write into, between guard bands."""

    def __init__(self, device, shape: tuple[int, ...], storage_dtype: str) -> None:
        self._device, self._stored = device, storage_dtype
        self.array, self._memory = guarded(device, shape, laid(np.empty(0), storage_dtype).dtype)

    def get(self) -> np.ndarray:
        """Returns what was written, as float32, and asserts that nothing was around it."""
        check_guards(self._device, self._memory, self.array.dtype)
        return get(self._device, self.array, self._stored)


class OverflowFlag:
    """A flag that kernels set where a number does not fit: they are given ``overflow``."""

    def __init__(self) -> None:
        import cupy

        self._word = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.int32, 1)
        self._word[0] = 0
        self.overflow = _cpu.Overflow(self._word.ctypes.data, 7)

    def is_set(self) -> bool:
        """Whether a kernel has set it since this was last asked."""
        import cupy

        cupy.cuda.Device().synchronize()
        found = int(self._word[0])
        assert found in (0, 7)
        self._word[0] = 0
        return found == 7


def assert_same_and_infinite_alike(found: np.ndarray, wanted: np.ndarray, stored: str) -> None:
    """Checks results of an image with infinities or NaN: others differ by rounding."""
    lost = ~np.isfinite(wanted)
    assert lost.any()
    assert np.array_equal(found[lost], wanted[lost], equal_nan=True)
    units = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[stored]
    largest = np.abs(wanted[~lost]).max()
    assert np.abs(found[~lost] - wanted[~lost]).max() <= 4 * units * largest
