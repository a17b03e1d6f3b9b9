"""The arguments of compiled functions that C++ takes as structs (``csrc/ops/{images,epilogue,launch}.h``).

Each function here returns a struct's members in their order, to be passed one after another: addresses stay
arguments of their own, which a plan fills in from pass to pass.
"""

from __future__ import annotations

import math
from typing import Any

from .kernel import ANY_BATCH, NO_ONE, Call, storage_of
from .native import _cpu

#: Changes nothing: what kernels apply where a node has no activation.
NO_ACTIVATION = _cpu.Activation(_cpu.UnaryFunction.clip, -math.inf, math.inf)

#: No images, of a residual that is absent.
NO_IMAGES = (0, 0, _cpu.ElementType.float32)


def activation(record: Any) -> Any:
    """Returns the Activation of a :class:`~cnn_engine.operators.unary.Unary`, or of None."""
    if record is None:
        return NO_ACTIVATION
    function = getattr(_cpu.UnaryFunction, record.function)
    return _cpu.Activation(function, float(record.alpha), float(record.beta))


def input_images(call: Call, place: int) -> tuple:
    """Returns the Images of input ``place`` of a call, NO_IMAGES where it is absent."""
    value = call.inputs[place] if place < len(call.inputs) else None
    if value is None:
        return NO_IMAGES
    return call.input_addresses[place], call.pitch(value), storage_of(value)


def output_images(call: Call, place: int = 0) -> tuple:
    """Returns the Images of output ``place`` of a call."""
    value = call.outputs[place]
    return call.output_addresses[place], call.pitch(value), storage_of(value)


def input_values(call: Call, place: int = 0) -> tuple:
    """Returns the Values of input ``place`` of a call."""
    return call.input_addresses[place], storage_of(call.inputs[place])


def output_values(call: Call, place: int = 0) -> tuple:
    """Returns the Values of output ``place`` of a call."""
    return call.output_addresses[place], storage_of(call.outputs[place])


def prologue(
    scale: Any = 0, shift: Any = 0, per_image: bool = False, floor: float | None = None
) -> tuple:
    """Returns a Prologue.

    Args:
        scale, shift: their addresses, or 0.
        per_image: whether each image has scales of its own.
        floor: or None.
    """
    return scale, shift, per_image, -math.inf if floor is None else floor


def launch(call: Call, rank: int = 0) -> tuple:
    """Returns a Launch of a call but for its stream, which :meth:`Call.native` passes."""
    return call.workspace, call.ready, call.holds, ANY_BATCH if call.any_batch else rank


def epilogue(
    record: Any = None, bias: Any = 0, residual: tuple = NO_IMAGES, overflow: Any = NO_ONE
) -> tuple:
    """Returns an Epilogue.

    Args:
        record: of the activation, or None.
        bias: its address, or 0.
        residual: the Images that are added.
        overflow: who learns of results past float16's range: a call's ``overflow``.
    """
    return bias, *residual, activation(record), overflow
