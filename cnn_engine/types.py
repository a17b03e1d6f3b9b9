"""The type of a tensor: element type, dimensions, layout in memory, and quantization.

Every tensor of a graph has a :class:`TensorType`; how many bytes it takes follows from that alone.
``csrc/ops/types.h`` has the same element types for the compiled kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import InputError, expected, not_one_of

__all__ = ["INTEGER_RANGES", "ITEM_BYTES", "Quantization", "Shape", "TensorType"]

Shape = tuple[int, ...]

#: Bytes of one element in memory, by the name of its type. NumPy's names, and those of types that it lacks;
#: fewer than 8 bits take a byte, as in ``ml_dtypes``. ``tf32`` is a float32 that is rounded as it is read.
ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "int2": 1, "uint2": 1, "int4": 1, "uint4": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2,
    "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "float4_e2m1fn": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "tf32": 4, "float32": 4, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip

#: The lowest and the highest number of each integer type that may stand for real numbers.
INTEGER_RANGES: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (2, 4, 8, 16, 32)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (2, 4, 8, 16)},
}


@dataclass(frozen=True)
class Quantization:
    """Meaning of a tensor's integers: ``real = (integer - zero_point) * scale``.

    Attributes:
        scale: steps between neighbouring integers, float32; one, or one for each index along ``axis``.
            Arrays and single numbers are taken too, and kept as a tuple.
        zero_point: the integers that stand for 0; as many as scales, or one for all of them.
        axis: the dimension along which scales differ; None: one scale for the whole tensor.

    Raises:
        InputError: a scale is not a positive float32 number, or the counts do not fit.
    """

    scale: tuple[float, ...]
    zero_point: tuple[int, ...] = (0,)
    axis: int | None = None

    def __post_init__(self) -> None:
        scale = tuple(np.asarray(self.scale, np.float32).ravel().tolist())
        for number in scale:
            if not 0 < number < math.inf:
                raise expected("scale", "positive finite float32 numbers", number)
        zero_point = tuple(np.asarray(self.zero_point).astype(np.int64).ravel().tolist())
        if self.axis is None and len(scale) != 1:
            raise expected("scale", "one number where there is no axis", f"{len(scale)} numbers")
        if len(zero_point) == 1:
            zero_point *= len(scale)
        if len(zero_point) != len(scale):
            raise expected("zero_point", f"1 or {len(scale)} integers", len(zero_point))
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "zero_point", zero_point)


@dataclass(frozen=True)
class TensorType:
    """Type of a tensor, apart from its name and its numbers.

    Attributes:
        dtype: the element type, a key of :data:`ITEM_BYTES`: what operators take and make.
        shape: all dimensions; ``()`` is a scalar. A dimension may be a
            :class:`~cnn_engine.graph.dims.Dim`.
        layout: ``contiguous`` (row-major), or a name that an engine's kernels agree on.
        storage_dtype: the type of the elements in memory, where that is another: ``float16`` or ``bfloat16``
            for ``float32``. Empty: ``dtype``.
        quantization: what integers stand for; None: themselves.

    Raises:
        InputError: there is no such type, a dimension is negative, or the quantization does not fit.
    """

    dtype: str = "float32"
    shape: Shape = ()
    layout: str = "contiguous"
    storage_dtype: str = ""
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("dtype", self.dtype), ("storage_dtype", self.memory_dtype)):
            if dtype not in ITEM_BYTES:
                raise not_one_of(name, ITEM_BYTES, dtype)
        for size in self.shape:
            if isinstance(size, int) and size < 0:
                raise expected("shape", "dimensions from 0", list(self.shape))
        if self.quantization is not None:
            self._check(self.quantization)

    def _check(self, quantization: Quantization) -> None:
        if self.dtype not in INTEGER_RANGES:
            raise not_one_of("dtype of a quantized tensor", INTEGER_RANGES, self.dtype)
        lowest, highest = INTEGER_RANGES[self.dtype]
        for zero_point in quantization.zero_point:
            if not lowest <= zero_point <= highest:
                raise expected("zero_point", f"{lowest} to {highest} ({self.dtype})", zero_point)
        axis, count = quantization.axis, len(quantization.scale)
        if axis is None:
            return
        if not 0 <= axis < len(self.shape):
            raise expected("axis", f"a dimension of {list(self.shape)}", axis)
        size: Any = self.shape[axis]
        if isinstance(size, int) and size != count:
            raise InputError(
                f"scale: expected {size} numbers, one for each index of axis {axis}, found {count}"
            )

    @property
    def memory_dtype(self) -> str:
        """The type of the elements in memory."""
        return self.storage_dtype or self.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """The bytes of an element in memory."""
        return ITEM_BYTES[self.memory_dtype]

    @property
    def nbytes(self) -> int:
        """The bytes of the elements in memory, without padding."""
        return self.size * self.item_bytes
