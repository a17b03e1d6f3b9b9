"""Quantized operators: ONNX's own, and those that ONNX Runtime adds in ``com.microsoft``.

Layers become records of integers. Pointwise operators of 8 bits become what defines them, the float operator
between DequantizeLinear and QuantizeLinear: lowering makes integers of both alike.
"""

from __future__ import annotations

import math

import numpy as np

from ....errors import InputError
from ....operators.binary import Add, Div, Mul
from ....operators.cast import Cast
from ....operators.operator import Operator
from ....operators.quantized import (
    EIGHT_BITS,
    DequantizeLinear,
    DynamicQuantizeLinear,
    QuantizeLinear,
)
from ....operators.quantized_conv2d import QuantizedConv2d
from ....operators.quantized_linear import QuantizedLinear, QuantizedMatmul
from ....operators.shaping import Concat, Reshape, Transpose
from ....operators.unary import LeakyRelu, Sigmoid
from ....types import INTEGER_RANGES
from .. import model as protobuf
from ..refusal import Refusal
from . import converts
from .windowed import _as_image, _finish_row, _flat, _kernel_of_weight, _numbers, _padding, _rank

DOMAIN = "com.microsoft"

#: Types that a quantized tensor may have beside integers.
_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")


def _checked(call, index: int, name: str = "scale") -> str:
    """Returns the name of an input that is a scale: where it is known, a positive finite number."""
    if call.is_constant(index):
        found = np.asarray(call.constant(index, name), np.float64).reshape(-1)
        wrong = found[~((found > 0) & (found < math.inf))]
        if wrong.size:
            raise InputError(f"{name}: expected positive finite numbers, found {wrong[0]}")
    return call.input(index)


def _zero(call, index: int) -> str | None:
    return call.inputs[index] if call.has(index) else None


def _dtype(call, index: int) -> str:
    """Returns the type that a zero point gives its tensor; without one ONNX has uint8."""
    return call.type_of(index) if call.has(index) else "uint8"


def _blocks(call) -> dict[str, int]:
    return {"axis": call.number("axis", 1), "block_size": call.number("block_size", 0)}


def _stated(call, *names: str) -> str | None:
    """Returns the element type that an attribute names, or None."""
    number = call.number("output_dtype", 0)
    return protobuf.dtype_name(number, True) if number else None


@converts("QuantizeLinear")
@converts("QuantizeLinear", domain=DOMAIN)
def quantize(call) -> None:
    stated, options = _stated(call), _blocks(call)
    dtype = _dtype(call, 2) if call.has(2) else stated or "uint8"
    if stated not in (None, dtype):
        raise InputError(f"output_dtype: expected the zero point's {dtype}, found {stated}")
    if dtype not in INTEGER_RANGES and dtype not in _FLOATS:
        raise InputError(f"zero_point: expected a quantized type, found {dtype}")
    if call.number("precision", 0) not in (0, 1):
        raise Refusal("precision", "divisions in anything but float32 are not supported")
    saturate = bool(call.number("saturate", 1))
    call.refuse_others()
    inputs = [call.input(0), _checked(call, 1), _zero(call, 2)]
    call.finish(QuantizeLinear(dtype=dtype, saturate=saturate, **options), inputs)


@converts("DequantizeLinear")
@converts("DequantizeLinear", domain=DOMAIN)
def dequantize(call) -> None:
    stated, options = _stated(call), _blocks(call)
    call.refuse_others()
    inputs = [call.input(0), _checked(call, 1), _zero(call, 2)]
    op = DequantizeLinear(**options)
    if stated in (None, call.type_of(1)):
        call.finish(op, inputs)
    else:
        call.finish(Cast(stated), [call.emit(op, inputs)])


@converts("DynamicQuantizeLinear")
def dynamic_quantize(call) -> None:
    call.refuse_others()
    call.finish(DynamicQuantizeLinear(), [call.input(0)], 3)


def _flat_parameter(call, name: str | None) -> str | None:
    """Returns a zero point of one number for each channel, or of one, without other dimensions."""
    shape = () if name is None else call.value_of(name).shape
    if len(shape) < 2:
        return name
    return call.emit(Reshape((math.prod(shape),), allow_zero=True), [name])


def _scale(call, factors: list[str], divisor: str | None, shape: tuple[int, ...]) -> str:
    """Returns the name of the product of scales over a divisor, rounded to float32 each, of a shape."""
    first, *others = factors
    for name in others:
        first = call.emit(Mul(), [first, name])
    if divisor is not None:
        first = call.emit(Div(), [first, divisor])
    if call.value_of(first).shape == shape:
        return first
    return call.emit(Mul(), [first, call.set_constant(np.ones(shape, np.float32))])


def _conv(call, weight: int, places: tuple[str | None, ...], dtype: str) -> None:
    """Adds a quantized convolution.

    Args:
        weight: the input that is the weight.
        places: names of the record's inputs after x and the weight.
    """
    rank = _rank(call)
    if rank == 3:
        raise Refusal(None, "quantized convolutions of images with depth are not supported")
    kernel = _kernel_of_weight(call, rank, weight)
    stride, dilation = _numbers(call, "strides", rank, 1), _numbers(call, "dilations", rank, 1)
    padding = _padding(call, call.value(0).shape[2:], kernel, stride, dilation)
    groups = call.number("group", 1)
    call.refuse_others()
    if rank == 1:
        stride, padding, dilation = _flat(stride, 1), _flat(padding, 0), _flat(dilation, 1)
    op = QuantizedConv2d(
        dtype=dtype, stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    if rank == 1:
        x, w = _as_image(call, call.input(0)), _as_image(call, call.input(weight))
        _finish_row(call, op, [x, w, *places])
    else:
        call.finish(op, [call.input(0), call.input(weight), *places])


@converts("QLinearConv")
def qlinear_conv(call) -> None:
    """Inputs: x, scale, zero; weight, scale, zero; the output's scale, zero; bias."""
    filters = call.value(3).shape[:1]
    scales = [_checked(call, 1, "x_scale"), _checked(call, 4, "w_scale")]
    scale = _scale(call, scales, _checked(call, 6, "y_scale"), filters)
    bias = call.inputs[8] if call.has(8) else None
    zeros = _zero(call, 2), _flat_parameter(call, _zero(call, 5)), _zero(call, 7)
    _conv(call, 3, (scale, bias, *zeros), _dtype(call, 7))


@converts("ConvInteger")
def conv_integer(call) -> None:
    _conv(call, 1, (None, None, _zero(call, 2), _flat_parameter(call, _zero(call, 3))), "int32")


def _of_rows(call, name: str | None, matrix: int) -> str | None:
    """Returns a parameter with a number for each row of ``a`` as a column of them."""
    rank, shape = len(call.value(matrix).shape), () if name is None else call.value_of(name).shape
    if len(shape) != 1 or shape == (1,) or rank < 2:
        return name
    return call.emit(Reshape((*shape, 1), allow_zero=True), [name])


@converts("MatMulInteger")
def matmul_integer(call) -> None:
    call.refuse_others()
    zeros = _of_rows(call, _zero(call, 2), 0), _zero(call, 3)
    call.finish(QuantizedMatmul("int32"), [call.input(0), call.input(1), None, *zeros])


@converts("QLinearMatMul")
@converts("QLinearMatMul", domain=DOMAIN)
def qlinear_matmul(call) -> None:
    """Inputs: a, scale, zero; b, scale, zero; the output's scale, zero."""
    call.refuse_others()
    a_scale = _of_rows(call, _checked(call, 1, "a_scale"), 0)
    scale = call.emit(Mul(), [a_scale, _checked(call, 4, "b_scale")])
    scale = call.emit(Div(), [scale, _checked(call, 6, "y_scale")])
    zeros = _of_rows(call, _zero(call, 2), 0), _zero(call, 5), _zero(call, 7)
    op = QuantizedMatmul(_dtype(call, 7))
    call.finish(op, [call.input(0), call.input(3), scale, *zeros])


@converts("QGemm", domain=DOMAIN)
def qgemm(call) -> None:
    """alpha * a' b' + c; inputs: a, scale, zero; b, scale, zero; c in int32; the output's scale, zero."""
    turn_a, turn_b = call.number("transA", 0), call.number("transB", 0)
    alpha = call.number("alpha", 1.0)
    call.refuse_others()
    if not alpha > 0:
        raise Refusal("alpha", f"expected a positive number, found {alpha}")
    a, weight = call.input(0), call.input(3)
    if len(call.value(0).shape) != 2 or len(call.value(3).shape) != 2:
        raise InputError("expected matrices, found other dimensions")
    a = call.emit(Transpose((1, 0)), [a]) if turn_a else a
    weight = weight if turn_b else call.emit(Transpose((1, 0)), [weight])
    columns = call.value_of(weight).shape[:1]
    scales = [_checked(call, 1, "a_scale"), _checked(call, 4, "b_scale")]
    if alpha != 1:
        scales.append(call.set_constant(np.float32(alpha).reshape(())))
    divisor = _checked(call, 7, "y_scale") if call.has(7) else None
    bias = _flat_parameter(call, call.inputs[6] if call.has(6) else None)
    zeros = [_zero(call, 2), _flat_parameter(call, _zero(call, 5)), _zero(call, 8)]
    op = QuantizedLinear("float32" if divisor is None else _dtype(call, 8))
    call.finish(op, [a, weight, _scale(call, scales, divisor, columns), bias, *zeros])


# -- pointwise operators of ONNX Runtime --------------------------------------------------------


def _real(call, first: int) -> str:
    """Returns what integers stand for: input ``first``, with its scale and its zero point after it."""
    inputs = [call.input(first), _checked(call, first + 1), _zero(call, first + 2)]
    return call.emit(DequantizeLinear(), inputs)


def _finish(call, real: str, scale: int) -> None:
    """Makes the node's output of real numbers by the scale and zero point that are inputs from ``scale``."""
    op = QuantizeLinear(dtype=_dtype(call, scale + 1))
    call.finish(op, [real, _checked(call, scale, "y_scale"), _zero(call, scale + 1)])


def _only_8_bits(call) -> None:
    if call.value(0).dtype not in EIGHT_BITS:
        raise InputError(f"expected int8 or uint8, found {call.value(0).dtype}")


@converts("QLinearAdd", "QLinearMul", domain=DOMAIN)
def qlinear_binary(call) -> None:
    """Inputs: a, scale, zero; b, scale, zero; the output's scale, zero."""
    call.refuse_others()
    op: Operator = Add() if call.operator == "QLinearAdd" else Mul()
    _finish(call, call.emit(op, [_real(call, 0), _real(call, 3)]), 6)


@converts("QLinearSigmoid", "QLinearLeakyRelu", domain=DOMAIN)
def qlinear_function(call) -> None:
    """Inputs: x, scale, zero; the output's scale, zero."""
    _only_8_bits(call)
    op: Operator = Sigmoid()
    if call.operator == "QLinearLeakyRelu":
        op = LeakyRelu(call.number("alpha", 0.01))
    call.refuse_others()
    _finish(call, call.emit(op, [_real(call, 0)]), 3)


@converts("QLinearConcat", domain=DOMAIN)
def qlinear_concat(call) -> None:
    """Inputs: the output's scale, zero; then x, scale, zero of every part."""
    axis = call.number("axis", 0)
    call.refuse_others()
    if len(call.inputs) < 5 or len(call.inputs) % 3 != 2:
        raise InputError(f"expected 2 inputs and 3 of every part, found {len(call.inputs)}")
    parts = [_real(call, first) for first in range(2, len(call.inputs), 3)]
    _finish(call, call.emit(Concat(axis), parts), 0)


@converts("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearSoftmax", domain=DOMAIN)
def qlinear_reduction(call) -> None:
    """Inputs: x, scale, zero; the output's scale, zero. With ``channels_last``, images are [N, H, W, C]."""
    last = bool(call.number("channels_last", 0))
    name = call.operator.removeprefix("QLinear")
    own = ["channels_last"]
    if name == "Softmax":
        if call.number("opset", 13) < 13:
            raise Refusal("opset", "a softmax of flattened dimensions is not supported")
        own.append("opset")
    x, rank = _real(call, 0), len(call.value(0).shape)
    images = (0, rank - 1, *range(1, rank - 1)), (0, *range(2, rank), 1)
    x = call.emit(Transpose(images[0]), [x]) if last else x
    y = call.onnx(name, [x], but=own)
    _finish(call, call.emit(Transpose(images[1]), [y]) if last else y, 3)
