"""Operators of ``com.microsoft``, which ONNX Runtime's optimisers write: ONNX's own, joined."""

from __future__ import annotations

import numpy as np

from ....errors import InputError
from ....operators import unary
from ....operators.binary import Add, Mul
from ....operators.matmul import Matmul
from ....operators.norm import LayerNorm, RmsNorm
from ....operators.operator import Operator, axis_in
from ....operators.shaping import Split, Transpose
from ..refusal import Refusal
from . import CONVERTERS, converts

DOMAIN = "com.microsoft"

#: Functions after a sum, and the numbers that they take.
_ACTIVATIONS: dict[str, tuple[type[unary.Unary], int]] = {
    "Relu": (unary.Relu, 0), "Tanh": (unary.Tanh, 0), "Sigmoid": (unary.Sigmoid, 0),
    "LeakyRelu": (unary.LeakyRelu, 1), "HardSigmoid": (unary.HardSigmoid, 2), "Elu": (unary.Elu, 1),
    "Clip": (unary.Clip, 2), "Softplus": (unary.Softplus, 0), "HardSwish": (unary.HardSwish, 0),
}  # fmt: skip


def _activation(name: str, numbers: list[float]) -> Operator | None:
    if not name:
        return None
    if name not in _ACTIVATIONS:
        raise Refusal("activation", f"{name[:40]!r} is not known")
    record, count = _ACTIVATIONS[name]
    return record(*numbers[:count])


def _end(call, name: str, op: Operator | None) -> None:
    """Makes the node's output of ``name`` by ``op``, or a copy."""
    if op is None:
        call.alias(name)
    else:
        call.finish(op, [name])


@converts("FusedConv", "NhwcConv", "NhwcFusedConv", domain=DOMAIN)
def convolution(call) -> None:
    """act(conv(x, w, b) + z), with x, z and the output in NHWC where the name says so."""
    own = ("activation", "activation_params")
    numbers = call.attribute("activation_params", [])
    op = _activation(
        call.text("activation", ""), list(numbers) if isinstance(numbers, list) else []
    )
    last = call.operator != "FusedConv"
    x = call.input(0)
    if last:
        x = call.emit(Transpose((0, 3, 1, 2)), [x])
    bias = call.inputs[2] if call.has(2) else None
    total = call.onnx("Conv", [x, call.input(1), bias], but=own)
    if last:
        total = call.emit(Transpose((0, 2, 3, 1)), [total])
    if call.has(3):
        total = call.emit(Add(), [total, call.input(3)])
    _end(call, total, op)


@converts("FusedGemm", domain=DOMAIN)
def gemm(call) -> None:
    own = ("activation", "activation_alpha", "activation_beta", "activation_gamma")
    numbers = [call.attribute(name) for name in own[1:]]
    op = _activation(call.text("activation", ""), [n for n in numbers if n is not None])
    _end(call, call.onnx("Gemm", call.inputs, but=own), op)


@converts("FusedMatMul", "TransposeMatMul", domain=DOMAIN)
def matmul(call) -> None:
    """alpha * a b, each with its last two dimensions, or the batch and the rows, exchanged."""
    names = []
    for index, which in enumerate("AB"):
        name, rank = call.input(index), len(call.value(index).shape)
        perm = list(range(rank))
        if call.number(f"transBatch{which}", 0) and rank > 2:
            perm = [*perm[1:-1], 0, rank - 1]
        if call.number(f"trans{which}", 0) and rank > 1:
            perm[-2:] = perm[:-3:-1]
        if perm != list(range(rank)):
            name = call.emit(Transpose(tuple(perm)), [name])
        names.append(name)
    alpha = call.number("alpha", 1.0)
    call.refuse_others()
    if alpha == 1:
        call.finish(Matmul(), names)
    else:
        factor = call.set_constant(np.asarray(alpha, call.value(0).dtype))
        call.finish(Mul(), [call.emit(Matmul(), names), factor])


@converts("Gelu", "BiasGelu", "FastGelu", "QuickGelu", domain=DOMAIN)
def gelu(call) -> None:
    op: Operator = unary.Gelu("tanh" if call.operator == "FastGelu" else "none")
    if call.operator == "QuickGelu":
        op = unary.Swish(call.number("alpha", 1.702))
    call.refuse_others()
    name = call.input(0)
    if call.has(1):
        name = call.emit(Add(), [name, call.input(1)])
    call.finish(op, [name])


def _norm(call, x: str, scale: int, simplified: bool, axis: int) -> None:
    """Makes outputs 0 to 2 of x normalised, by input ``scale`` and, unless simplified, the bias after it."""
    epsilon = call.number("epsilon", 1e-12 if call.operator.startswith("Skip") else 1e-5)
    call.number("stash_type", 1)
    call.refuse_others()
    bias = None if simplified or not call.has(scale + 1) else call.input(scale + 1)
    axis = axis_in(axis, len(call.value_of(x).shape))
    statistics = call.wants(1) or call.wants(2)
    if simplified:
        if statistics:
            raise Refusal("the outputs for training", "training is not supported")
        call.finish(RmsNorm(axis, epsilon), [x, call.input(scale)])
        return
    inputs = [x, call.input(scale), bias]
    call.finish(LayerNorm(axis, epsilon, statistics), inputs, 3 if statistics else 1)


@converts("LayerNormalization", "SimplifiedLayerNormalization", domain=DOMAIN)
@converts("SimplifiedLayerNormalization")
def layer_norm(call) -> None:
    simplified = call.operator.startswith("Simplified")
    _norm(call, call.input(0), 1, simplified, call.number("axis", -1))


@converts("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_layer_norm(call) -> None:
    """The norm of a sum: input, skip and the last input, a bias; the sum is output 3."""
    simplified = call.operator == "SkipSimplifiedLayerNormalization"
    total = call.emit(Add(), [call.input(0), call.input(1)])
    bias = 3 if simplified else 4
    if call.has(bias):
        total = call.emit(Add(), [total, call.input(bias)])
    _norm(call, total, 2, simplified, -1)
    if call.wants(3):
        call.alias(total, 3)


@converts("BiasAdd", "BiasSplitGelu", domain=DOMAIN)
def bias_add(call) -> None:
    """x + b, with something more added; or of x + b a half times the other's gelu."""
    call.refuse_others()
    total = call.emit(Add(), [call.input(0), call.input(1)])
    if call.operator == "BiasAdd":
        call.finish(Add(), [total, call.input(2)])
        return
    halves = [call.temporary(), call.temporary()]
    size = call.value_of(total).shape[-1]
    if size % 2:
        raise InputError(f"expected an even number of columns, found {size}")
    call.emit(Split(-1, (size // 2, size // 2)), [total], halves)
    call.finish(Mul(), [halves[0], call.emit(unary.Gelu(), [halves[1]])])


@converts("GridSample", "Trilu", "Unique", domain=DOMAIN)
def renamed(call) -> None:
    """Operators that ONNX took over later as they are."""
    CONVERTERS["", call.operator](call)
