"""lower_qdq: a network with DequantizeLinear and QuantizeLinear around its layers becomes one of integers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....operators.operator import Operator
from ....operators.quantized import (
    DequantizeLinear,
    DynamicQuantizeLinear,
    Integers,
    QuantizeLinear,
)
from ....operators.quantized_linear import QuantizedLinear, QuantizedMatmul
from ....operators.shaping import Reshape
from ...folding import fold
from ...graph import Graph, Node, Note
from ...mapped import read
from ..canonical.constants import drop_unused, fold_constants
from ..canonical.identities import drop_identities, merge_shapes
from ..rewriting import Rewrites, absent, constant
from .computed_scales import fuse_computed_scales
from .layers import lower_layers
from .moves import hoist_quantizing, sink_dequantizing
from .sums import fuse_sums
from .tables import fuse_tables, tabulate

_QUANTIZED: tuple[type[Operator], ...] = (
    DequantizeLinear, QuantizeLinear, DynamicQuantizeLinear, Integers,
)  # fmt: skip


def lower_qdq(graph: Graph, refused: list[Note] | None = None) -> Graph:
    """Makes operators of integers of those between DequantizeLinear and QuantizeLinear.

    What cannot be one stays as it is, between the two.

    Args:
        refused: gets a note for each layer that stays: its name, what it would have been, and why.
    """
    if not any(isinstance(node.op, _QUANTIZED) for node in graph.nodes):
        return graph
    before = None
    while graph is not before:
        before = graph
        for rewrite in (
            sink_dequantizing, hoist_quantizing, tabulate, drop_identities, drop_unused, fold_constants
        ):  # fmt: skip
            graph = rewrite(graph)
    notes: list[Note] = []
    before = None
    while graph is not before:
        before = graph
        graph, notes = lower_layers(graph)
        graph = drop_unused(graph)
    if refused is not None:
        refused += notes
    for rewrite in (
        fuse_computed_scales, linear_rows, signed_weights, fuse_sums, fuse_tables, fold_dequantized,
        drop_unused, merge_shapes,
    ):  # fmt: skip
        graph = rewrite(graph)
    return drop_identities(graph)


def fold_dequantized(graph: Graph) -> Graph:
    """Computes the values of integer constants, where layers of floats read them."""
    nodes, made = [], {}
    for node in graph.nodes:
        known = all(name is None or name in graph.constants for name in node.inputs)
        if isinstance(node.op, DequantizeLinear) and known:
            arrays = [None if name is None else graph.constants[name] for name in node.inputs]
            outputs = graph.outputs_of(node)
            made[node.outputs[0]] = fold(node.op, outputs, arrays)[0]
            nodes.append(node)
    notes = [Note(node.name, "a constant", "layers of floats read it") for node in nodes]
    return graph.replaced(nodes, (), made, notes) if nodes else graph


def signed_weights(graph: Graph) -> Graph:
    """Has weights of layers of integers in int8: those of uint8 and their zero points less 128."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        weight = constant(graph, node, 1) if isinstance(node.op, Integers) else None
        if weight is None or weight.dtype != np.uint8 or isinstance(node.op, QuantizedMatmul):
            continue
        zero = constant(graph, node, 5)
        if zero is None and not absent(node, 5):
            continue
        offsets = np.uint8(0) if zero is None else zero
        names = [rewrites.fresh(f"{node.name}/{part}") for part in ("weight", "w_zero")]
        inputs = [*node.inputs, *[None] * (6 - len(node.inputs))]
        inputs[1], inputs[5] = names
        arrays = ((np.asarray(a) ^ np.uint8(128)).view(np.int8) for a in (read(weight), offsets))
        constants = dict(zip(names, arrays, strict=True))
        by = replace(node, inputs=tuple(inputs))
        rewrites.replace([node], [by], "integers of weights are signed", constants)
    return rewrites.apply()


def linear_rows(graph: Graph) -> Graph:
    """Makes linear layers of products by a constant matrix."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        b = constant(graph, node, 1) if isinstance(node.op, QuantizedMatmul) else None
        if b is None or b.ndim != 2:
            continue
        x = graph.values[node.inputs[0]]
        places = [node.inputs[i] if i < len(node.inputs) else None for i in range(2, 6)]
        scale, x_zero, w_zero, y_zero = places
        shapes = [() if n is None else graph.values[n].shape for n in (scale, w_zero, x_zero)]
        computed = scale is not None and scale not in graph.constants
        known = w_zero is None or w_zero in graph.constants
        known = known and (not computed or shapes[0] in ((), (1,)))
        columns = b.shape[1]
        fits = all(shape in ((), (1,), (columns,), (1, columns)) for shape in shapes[:2])
        if not known or not fits or shapes[2] not in ((), (1,)) or len(x.shape) < 2:
            continue
        constants: dict[str, np.ndarray] = {}

        def column(
            name: str | None, part: str, node=node, constants=constants, columns=columns
        ) -> str | None:
            if name not in graph.constants:
                return name
            made = rewrites.fresh(f"{node.name}/{part}")
            whole = np.broadcast_to(graph.constants[name].reshape(-1), (columns,))
            constants[made] = np.ascontiguousarray(whole)
            return made

        weight = rewrites.fresh(f"{node.name}/weight")
        constants[weight] = np.ascontiguousarray(read(b).T)
        scale, w_zero = column(scale, "scale"), column(w_zero, "w_zero")
        flat, before, after, y = x.name, [], [], node.outputs[0]
        if len(x.shape) > 2:
            flat, y = (rewrites.fresh(f"{node.name}/{part}") for part in ("x", "y"))
            rows = x.size // x.shape[-1] if x.shape[-1] else 0
            ops = (
                Reshape((rows, x.shape[-1]), allow_zero=True),
                Reshape((*x.shape[:-1], columns), allow_zero=True),
            )
            before = [Node(rewrites.fresh(f"{flat}.reshape"), ops[0], (x.name,), (flat,))]
            after = [Node(rewrites.fresh(f"{y}.reshape"), ops[1], (y,), node.outputs)]
        inputs = [flat, weight, scale, None, x_zero, w_zero, y_zero]
        while inputs[-1] is None:
            inputs.pop()
        op = QuantizedLinear(node.op.dtype, node.op.low, node.op.high)
        layer = replace(node, op=op, inputs=tuple(inputs), outputs=(y,))
        rewrites.replace([node], [layer, *before, *after], "a linear layer of rows", constants)
    return rewrites.apply()
