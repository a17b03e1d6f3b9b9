"""Between real numbers and the integers that stand for them: quantize, dequantize, look up.

An integer q stands for (q - zero_point) * scale. Scales and zero points are inputs, so that they may be
computed; kernels may ask for constants. Every operator with 8-bit outputs ends with :func:`saturated`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from ..types import INTEGER_RANGES
from .operator import Operator, Shape, Value, axis_in, float64, is_float, need, record

#: The types of 8 bits, which quantized layers read and make.
EIGHT_BITS = ("int8", "uint8")


def saturated(
    v: np.ndarray, zero: np.ndarray | int | None, dtype: str, low: int | None, high: int | None
) -> np.ndarray:
    """Returns clip(round_half_even(v) + zero, low, high) as ``dtype``; NaN gives ``low``.

    Args:
        v: float32 numbers in steps of the output.
        low, high: at least and at most what the type holds; None: what it holds.
    """
    least, most = INTEGER_RANGES[dtype]
    least, most = least if low is None else low, most if high is None else high
    zero = 0 if zero is None else np.asarray(zero, np.float64)
    with np.errstate(all="ignore"):
        whole = np.rint(v).astype(np.float64) + zero
        return np.where(np.isnan(whole), least, np.clip(whole, least, most)).astype(dtype)


def check_range(dtype: str, low: int | None, high: int | None) -> None:
    """Raises InputError unless [low, high] lies within ``dtype``, and holds a number."""
    least, most = INTEGER_RANGES[dtype]
    found = least if low is None else low, most if high is None else high
    if not least <= found[0] <= found[1] <= most:
        raise InputError(
            f"low, high: expected a range in {least} to {most} ({dtype}), found {list(found)}"
        )


def check_parameter(name: str, value: Value | None, dtype: str, *shapes: Shape) -> None:
    """Raises InputError unless ``value`` is absent, or of a type and of one of some shapes."""
    if value is None:
        return
    if value.dtype != dtype:
        raise InputError(f"{name}: expected {dtype}, found {value.dtype}")
    if value.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise InputError(f"{name}: expected {wanted}, found {list(value.shape)}")


@record
class _Scaled(Operator):
    """What quantizing and dequantizing have in common.

    Attributes:
        axis: the dimension of x along which a scale of one dimension lies, or blocks do.
        block_size: elements along ``axis`` that share a scale of x's rank; 0: no blocks.
    """

    axis: int = 1
    block_size: int = 0

    def _check(self, x: Value, scale: Value, zero: Value | None) -> None:
        if not is_float(scale.dtype):
            raise InputError(f"scale: expected floats, found {scale.dtype}")
        if zero is not None and zero.shape != scale.shape and (zero.size, scale.size) != (1, 1):
            raise InputError(
                f"zero_point: expected the scale's shape {list(scale.shape)}, found {list(zero.shape)}"
            )
        if self.block_size < 0:
            raise InputError(f"block_size: expected at least 0, found {self.block_size}")
        if scale.shape in ((), (1,)) and not self.block_size:
            return
        axis = axis_in(self.axis, len(x.shape))
        wanted: Shape = x.shape[axis : axis + 1]
        if self.block_size:
            blocks = -(-x.shape[axis] // self.block_size)
            wanted = (*x.shape[:axis], blocks, *x.shape[axis + 1 :])
        if scale.shape != wanted:
            raise InputError(f"scale: expected {list(wanted)}, found {list(scale.shape)}")

    def spread(self, parameter: np.ndarray | None, shape: Shape) -> np.ndarray | None:
        """Returns a scale or zero points in a shape that broadcasts with x of ``shape``."""
        if parameter is None:
            return None
        if parameter.size == 1 and not self.block_size:
            return parameter.reshape(())
        axis = axis_in(self.axis, len(shape))
        if self.block_size:
            whole = np.repeat(parameter, self.block_size, axis)
            return whole[(*[slice(None)] * axis, slice(shape[axis]))]
        return parameter.reshape((-1, *[1] * (len(shape) - axis - 1)))


@record
class QuantizeLinear(_Scaled):
    """q = saturate(round_half_even(x / scale) + zero_point), divided in float32.

    Inputs: x, floats; scale, one number, one for each index of ``axis``, or one for each block; zero_point
    like it, of the output's type, or None.

    Attributes:
        dtype: of the output; integers, or a type of 8 bits that ``ml_dtypes`` has, such as float8_e4m3fn.
        saturate: whether floats of 8 bits take their largest number where they have no room; else NaN or
            infinity.
    """

    kind: ClassVar[str] = "quantize_linear"
    dtype: str = "uint8"
    saturate: bool = True

    def infer(self, inputs):
        need(inputs, 2, 3)
        x, scale, zero = (*inputs, None)[:3]
        if not is_float(x.dtype) and x.dtype != "int32":
            raise InputError(f"expected floats or int32, found {x.dtype}")
        self._check(x, scale, zero)
        if zero is not None and zero.dtype != self.dtype:
            raise InputError(f"zero_point: expected {self.dtype}, found {zero.dtype}")
        return ((x.shape, self.dtype),)

    def reference(self, x, scale, zero_point=None):
        x = np.asarray(x)
        step = self.spread(np.asarray(scale, np.float32), x.shape)
        with np.errstate(all="ignore"):
            v = x.astype(np.float32) / step
        zero = self.spread(zero_point, x.shape)
        if self.dtype in INTEGER_RANGES:
            return saturated(v, zero, self.dtype, None, None)
        return _as_small_float(v, self.dtype, self.saturate)


@record
class DequantizeLinear(_Scaled):
    """x = (q - zero_point) * scale, in float32.

    Inputs: q, integers or floats of 8 bits; scale and zero_point as of :class:`QuantizeLinear`.
    """

    kind: ClassVar[str] = "dequantize_linear"
    folds: ClassVar[bool] = False  # quantized layers read the integers

    def infer(self, inputs):
        need(inputs, 2, 3)
        q, scale, zero = (*inputs, None)[:3]
        if q.dtype not in INTEGER_RANGES and not q.dtype.startswith(("float4", "float8")):
            raise InputError(f"expected integers or floats of a few bits, found {q.dtype}")
        self._check(q, scale, zero)
        if zero is not None and zero.dtype != q.dtype:
            raise InputError(f"zero_point: expected {q.dtype}, found {zero.dtype}")
        return ((q.shape, scale.dtype),)

    def reference(self, q, scale, zero_point=None):
        q = np.asarray(q)
        zero = self.spread(zero_point, q.shape)
        steps = q.astype(np.float64) - (0 if zero is None else zero.astype(np.float64))
        with np.errstate(all="ignore"):
            return steps * float64(self.spread(np.asarray(scale), q.shape))


@record
class DynamicQuantizeLinear(Operator):
    """q, scale and zero_point of x, floats, by the range of its numbers and 0; integers are uint8.

    scale = (max - min) / 255, 1 where all of x is 0; zero_point = saturate(round_half_even(-min / scale)).
    """

    kind: ClassVar[str] = "dynamic_quantize_linear"

    def infer(self, inputs):
        need(inputs, 1)
        if not is_float(inputs[0].dtype):
            raise InputError(f"expected floats, found {inputs[0].dtype}")
        return ((inputs[0].shape, "uint8"), ((), "float32"), ((), "uint8"))

    def reference(self, x):
        x = np.asarray(x).astype(np.float32)
        with np.errstate(all="ignore"):
            low, high = x.min(initial=0), x.max(initial=0)
            scale = np.float32((high - low) / np.float32(255))
            scale = scale if scale != 0 else np.float32(1)
            zero = saturated(-low / scale, 0, "uint8", None, None)
            return saturated(x / scale, zero, "uint8", None, None), float64(scale), zero


@record
class Lookup(Operator):
    """y = table[q], the function of a number of 8 bits: table[i] belongs to the number of the bits i.

    Inputs: q, int8 or uint8 of any shape; table [256] of the output's type. The table of an int8 has what
    belongs to 0 to 127 first, and then what belongs to -128 to -1.
    """

    kind: ClassVar[str] = "lookup"

    def infer(self, inputs):
        need(inputs, 2)
        q, table = inputs
        if q.dtype not in EIGHT_BITS:
            raise InputError(f"expected int8 or uint8, found {q.dtype}")
        if table.shape != (256,):
            raise InputError(f"table: expected [256], found {list(table.shape)}")
        return ((q.shape, table.dtype),)

    def reference(self, q, table):
        return np.asarray(table)[np.ascontiguousarray(q).view(np.uint8)]


@record
class Integers(Operator):
    """Base of the layers whose sums are integers: see :meth:`finished`.

    Attributes:
        dtype: of the output: ``int8`` or ``uint8``; ``int32``, the sum itself; ``float32``, the sum times the
            scale, for layers that are not quantized again.
        low, high: the range of the output, with 8 bits: a relu's low is the zero point. None: the type's.
    """

    dtype: str = "int8"
    low: int | None = None
    high: int | None = None

    def check_output(self, scale: Value | None, y_zero: Value | None) -> None:
        if self.dtype not in (*EIGHT_BITS, "int32", "float32"):
            raise InputError(f"dtype: expected int8, uint8, int32 or float32, found {self.dtype}")
        small = self.dtype in EIGHT_BITS
        if small:
            check_range(self.dtype, self.low, self.high)
        elif y_zero is not None or self.low is not None or self.high is not None:
            raise InputError(f"expected no zero point and no range of {self.dtype}, found some")
        if (scale is None) != (self.dtype == "int32"):
            raise InputError("scale: expected one unless the output is int32")
        check_parameter("y_zero", y_zero, self.dtype, (), (1,))

    def finished(
        self,
        total: np.ndarray,
        scale: np.ndarray | None,
        y_zero: np.ndarray | None,
        more: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns the output of sums: v = float32(total) * scale + more, then round, zero point and range.

        Args:
            total: whole numbers; int32 holds them modulo 2^32, as it does in kernels.
            scale: float32, broadcasts with them.
            more: float32 to be added before rounding. Product and sum are rounded to float32 each.
        """
        total = total.astype(np.int64).astype(np.int32)
        if self.dtype == "int32":
            return total
        with np.errstate(all="ignore"):
            v = total.astype(np.float32) * np.asarray(scale, np.float32)
            v = v if more is None else v + more
        if self.dtype == "float32":
            return v.astype(np.float64)
        return saturated(v, _number(y_zero), self.dtype, self.low, self.high)


def exact(q: np.ndarray, zero: np.ndarray | None) -> np.ndarray:
    """Returns q - zero in float64, in which BLAS sums products of such numbers exactly."""
    found = np.asarray(q).astype(np.float64)
    return found if zero is None else found - np.asarray(zero, np.float64)


def _number(parameter: np.ndarray | None) -> np.ndarray | None:
    """Returns one number without dimensions."""
    return None if parameter is None else np.asarray(parameter).reshape(())


def _as_small_float(v: np.ndarray, dtype: str, saturate: bool) -> np.ndarray:
    import ml_dtypes  # registers its types with NumPy

    kind = np.dtype(dtype)
    if saturate:
        most = float(ml_dtypes.finfo(kind).max)
        v = np.where(np.isnan(v), v, np.clip(v, -most, most))
    with np.errstate(all="ignore"):
        return v.astype(kind)
