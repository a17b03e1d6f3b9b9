"""Fourier transforms: of one dimension, and of the frames of a signal."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, axis_in, check_types, float64, need, record


def _complex(x: np.ndarray) -> np.ndarray:
    """Returns numbers of real and imaginary parts in the last dimension, or of real parts alone."""
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _parts(x: np.ndarray) -> np.ndarray:
    return np.stack([x.real, x.imag], axis=-1)


def _check_parts(x) -> None:
    if len(x.shape) < 2 or x.shape[-1] not in (1, 2):
        raise InputError(f"expected real or complex numbers [..., 1 or 2], found {list(x.shape)}")


@record
class Dft(Operator):
    """The discrete Fourier transform. Input: x [..., 1 or 2]: real, or real and imaginary parts.

    Attributes:
        length: elements that are transformed: x is cut or filled with zeros; 0: as many as there are.
        axis: the dimension, never the last.
        inverse: whether it is the inverse, divided by the length.
        onesided: whether the output of real x is its first half, which tells all; of an inverse, whether x is
            such a half, and the output real.
    """

    kind: ClassVar[str] = "dft"
    length: int = 0
    axis: int = -2
    inverse: bool = False
    onesided: bool = False

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        check_types("floats", x.dtype)
        _check_parts(x)
        axis = axis_in(self.axis, len(x.shape))
        if axis == len(x.shape) - 1:
            raise InputError("axis: expected another dimension than the last, which holds parts")
        length = self._length(x.shape)
        if length < 1:
            raise InputError(f"dft_length: expected at least 1, found {length}")
        if self.onesided and not self.inverse and x.shape[-1] != 1:
            raise InputError(f"onesided: expected real numbers, found {list(x.shape)}")
        size, last = length, 2
        if self.onesided and self.inverse:
            last = 1
        elif self.onesided:
            size = length // 2 + 1
        return (((*x.shape[:axis], size, *x.shape[axis + 1 : -1], last), x.dtype),)

    def _length(self, shape) -> int:
        size = shape[axis_in(self.axis, len(shape))]
        return self.length or (2 * (size - 1) if self.inverse and self.onesided else size)

    def reference(self, x):
        return self.transform(float64(x))

    def transform(self, x: np.ndarray) -> np.ndarray:
        """Returns the output in the precision of ``x``."""
        axis, length = axis_in(self.axis, x.ndim), self._length(x.shape)
        numbers = _complex(x)
        if not self.inverse:
            transform = np.fft.rfft if self.onesided else np.fft.fft
            return _parts(transform(numbers, length, axis))
        if self.onesided:
            return np.fft.irfft(numbers, length, axis)[..., None]
        return _parts(np.fft.ifft(numbers, length, axis))

    def terms(self, inputs) -> int:
        return max(1, self._length(inputs[0].shape))


@record
class Stft(Operator):
    """The transforms of a signal's frames. Inputs: x [N, L, 1 or 2]; window [length] or None.

    The output is [N, frames, length or length // 2 + 1, 2].

    Attributes:
        step: from frame to frame.
        length: of a frame.
        onesided: whether the first half of each transform is given.
    """

    kind: ClassVar[str] = "stft"
    step: int
    length: int
    onesided: bool = True

    def infer(self, inputs):
        need(inputs, 1, 2)
        x, window = (*inputs, None)[:2]
        check_types("floats", x.dtype)
        _check_parts(x)
        if len(x.shape) != 3 or not 1 <= self.length <= x.shape[1] or self.step < 1:
            raise InputError(
                f"expected a signal [N, L, 1 or 2] with frames of up to L and steps from 1, found "
                f"{list(x.shape)}, {self.length} and {self.step}"
            )
        if window is not None and window.shape != (self.length,):
            raise InputError(f"window: expected [{self.length}], found {list(window.shape)}")
        if self.onesided and x.shape[2] != 1:
            raise InputError(f"onesided: expected real numbers, found {list(x.shape)}")
        size = self.length // 2 + 1 if self.onesided else self.length
        return (((x.shape[0], 1 + (x.shape[1] - self.length) // self.step, size, 2), x.dtype),)

    def reference(self, x, window=None):
        return self.transform(float64(x), None if window is None else float64(window))

    def transform(self, x: np.ndarray, window: np.ndarray | None = None) -> np.ndarray:
        """Returns the output in the precision of ``x``."""
        numbers = _complex(x)
        frames = np.lib.stride_tricks.sliding_window_view(numbers, self.length, axis=1)
        frames = frames[:, :: self.step]
        if window is not None:
            frames = frames * window
        return _parts((np.fft.rfft if self.onesided else np.fft.fft)(frames, axis=-1))

    def terms(self, inputs) -> int:
        return self.length
