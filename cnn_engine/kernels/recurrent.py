"""The kernels of recurrent layers: the steps over time, after the product of the input."""

from __future__ import annotations

from typing import Any

from ..graph.graph import Graph, Node, Value
from ..operators.recurrent import DynamicLstm, checked_lengths
from ..types import ITEM_BYTES
from .kernel import Bound, Call, Kernel, functions, packed, upload
from .native import _cpu
from .numpy import array_at


def _shape(node: Node, gates: Value) -> Any:
    """Returns the compiled functions' shape of a layer."""
    op = node.op
    steps, batch, directions, size = gates.shape
    each = [(*ones, *[ones[0]] * 3)[:3] for ones in op.functions]
    flat = [one for ones in (*each, each[0])[:2] for one in ones]
    return _cpu.RecurrentShape(
        getattr(_cpu.RecurrentCell, op.kind.removeprefix("dynamic_")), steps, batch, directions,
        size // op.gates, op.reverse, getattr(op, "reset_after", False),
        getattr(op, "coupled", False), op.clip,
        *(getattr(_cpu.UnaryFunction, one.function) for one in flat),
        *(one.alpha for one in flat), *(one.beta for one in flat), isinstance(op, DynamicLstm),
    )  # fmt: skip


def _all_float32(node: Node, graph: Graph) -> str | None:
    for place, value in enumerate(graph.inputs_of(node)):
        if value is not None and place != 3 and value.dtype != "float32":
            return f"expected float32, found {value.dtype}"
    return None


def _why_not(computed: bool):
    """Returns what says why a node cannot be run, where lengths may be ``computed`` or not."""

    def why_not(node: Node, graph: Graph) -> str | None:
        if node.inputs[1] not in graph.constants:
            return "expected constant weights, which are packed once"
        return _all_float32(node, graph) or _known_lengths(node, graph, computed)

    return why_not


def _known_lengths(node: Node, graph: Graph, computed: bool) -> str | None:
    """Says what is at fault with lengths that are known; those that are computed are checked each time."""
    name = node.inputs[3] if len(node.inputs) > 3 else None
    if name is None:
        return None
    if name not in graph.constants:
        return None if computed else "expected constant lengths of sequences, found computed ones"
    steps = graph.values[node.inputs[0]].shape[0]
    wrong = [n for n in graph.constants[name].tolist() if not 0 <= n <= steps]
    return f"expected lengths from 0 to {steps}, found {wrong[0]}" if wrong else None


def _workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
    shape = _shape(node, graph.values[node.inputs[0]])
    where = device.stream_handle if device.kind == "cuda" else threads
    return functions(device).recurrent_workspace(shape, where)


def _pack(node: Node, graph: Graph, device: Any) -> Any:
    """Returns the packed weights of the states."""
    shape = _shape(node, graph.values[node.inputs[0]])
    where = device.stream_handle if device.kind == "cuda" else 1

    def fill(address: int) -> Any:
        source = upload(graph.constants[node.inputs[1]], device)
        functions(device).recurrent_pack(source.address, address, shape, where)
        return source

    return packed(device, ITEM_BYTES["float32"] * shape.packed_size, fill)


def _make(call: Call) -> Bound:
    gates, _, bias, lengths, state, cell, peepholes = (*call.input_addresses, *[0] * 7)[:7]
    outputs = (*call.output_addresses, 0)[:3]
    shape = _shape(call.node, call.inputs[0])
    function, arguments = call.native(
        "recurrent", gates, call.prepared.address, bias, lengths, state, cell, peepholes, *outputs,
        call.workspace, shape,
    )  # fmt: skip
    value = call.inputs[3] if len(call.inputs) > 3 else None
    if value is None or call.device.kind != "cpu":
        return function, arguments
    steps, batch = call.inputs[0].shape[:2]

    def checked(*given: Any) -> None:
        checked_lengths(array_at(given[3], value), steps, batch)
        function(*given)

    return checked, arguments


ROWS = [
    Kernel(
        kind, "recurrent", device, _make, why_not=_why_not(device == "cpu"), workspace=_workspace,
        prepare=_pack, packs=(1,),
    )
    for kind, devices in (
        ("rnn", ("cpu", "cuda")), ("gru", ("cpu", "cuda")), ("lstm", ("cpu", "cuda")),
        ("dynamic_lstm", ("cpu",)),
    )
    for device in devices
]  # fmt: skip
