"""CUDA's kernels of squeeze and excitation: the gates of channels, and their use."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ... import _cpu
from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from ..arguments import NO_IMAGES, input_values
from ..convolution import limits
from ..cpu.channels_last import not_compiled
from ..kernel import Bound, Call, Kernel, storing
from .channels_last import compute_dtype_of, pack_on
from .fusing import AT_ANY_ADDRESS, NOT_SOONER, epilogues, is_clamp
from .requirements import HOPPER, TENSOR_CORES


def _gates_of(node: Node, images: Value, first: Value) -> tuple[Any, int, Any]:
    """Returns the shape of the images, the hidden sums and what weights are kept as."""
    n, h, w, c = images.shape
    return _cpu.AxisShape(n, h * w, c), first.shape[0], compute_dtype_of(node)


def _no_scaling_there(node: Node, graph: Graph, device: Any) -> str | None:
    """In tf32, and where others made the means, it takes longer than what it saves."""
    x, first = graph.inputs_of(node)[:2]
    shape, hidden, _ = _gates_of(node, x, first)
    if x.storage_dtype != node.op.compute_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    if reason := _no_gates(node, graph, scaled=True):
        return reason
    takes = device.kernels.squeeze_excite_scales(shape, hidden, device.target.native)
    return None if takes else NOT_SOONER


def _no_gates_there(node: Node, graph: Graph, device: Any) -> str | None:
    return _no_gates(node, graph)


def _is_given(value: str, graph: Graph) -> bool:
    """Whether a value is an input of the caller's, at any address, in another shape perhaps."""
    while (maker := graph.producers.get(value)) is not None and maker.op.kind == "reshape":
        value = maker.inputs[0]
    return maker is None


def _no_gates(node: Node, graph: Graph, scaled: bool = False) -> str | None:
    op = node.op
    if (op["scale"] is not None) != scaled:
        return "expected images to be multiplied" if scaled else "expected factors alone"
    if scaled and node.inputs[5] is not None:
        return "expected no means: images are read for them"
    if not is_clamp(op["clamp"]):
        return f"expected relu or clip after the product, found {op['clamp'].kind}"
    if _is_given(node.inputs[0], graph):
        return AT_ANY_ADDRESS
    weights = replace(node, inputs=node.inputs[:5])
    return not_compiled(weights, graph, *map(op.activation, ("first", "second")))


def _pack_gates(node: Node, graph: Graph, device: Any) -> Buffer:
    how = _gates_of(node, *graph.inputs_of(node)[:2])
    nbytes = device.kernels.squeeze_excite_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "squeeze_excite_pack", *how, positions=(1, 2))


def _make_gates(call: Call) -> Bound:
    op, gates = call.node.op, _gates_of(call.node, *call.inputs[:2])
    *biases, means = call.input_addresses[3:]
    read, both = (*input_values(call), call.prepared.address), epilogues(call, biases)
    out = call.output_addresses[0]
    if op["scale"] is not None:
        clip = _cpu.Activation(_cpu.UnaryFunction.clip, *limits(op["clamp"]))
        last = 0, *NO_IMAGES, clip, call.overflow
        return call.native("squeeze_excite_scale", *read, out, *gates, *both, *last)
    parts = call.inputs[5].shape[1] if means else 0
    return call.native("squeeze_excite", *read, means, parts, out, *gates, *both)


ROWS = [
    Kernel(
        "squeeze_excite", "squeeze_excite", "cuda", _make_gates, requires=TENSOR_CORES,
        why_not=_no_gates, why_not_fuse=_no_gates_there, prepare=_pack_gates, packs=(1, 2), early=(3, 4),
        stores=storing(0),
    ),
    Kernel(
        "squeeze_excite", "squeeze_excite_scale", "cuda", _make_gates, requires=HOPPER,
        why_not=partial(_no_gates, scaled=True), why_not_fuse=_no_scaling_there, prepare=_pack_gates,
        packs=(1, 2), early=(3, 4), stores=storing(None, 0), same_storage=True,
    ),
]  # fmt: skip
