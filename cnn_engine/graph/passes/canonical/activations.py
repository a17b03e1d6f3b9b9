"""Functions that exporters write out as several nodes, recognised and made one again."""

from __future__ import annotations

import math

from ....operators.binary import Add, Div, Mul, Prelu
from ....operators.unary import Erf, Gelu, HardSigmoid, HardSwish, LeakyRelu, Sigmoid, Swish
from ...graph import Graph, Node
from ..rewriting import Rewrites, constant, covering, only_user


def recognise_activations(graph: Graph) -> Graph:
    """Makes one node of x * sigmoid(x), x * hard_sigmoid(x) and x * (1 + erf(x / sqrt 2)) / 2.

    A PReLU of one slope is a leaky ReLU.
    """
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        if isinstance(node.op, Mul):
            found = _swish(graph, node) or _gelu(graph, node)
        else:
            found = _leaky_relu(graph, node)
        if found is None:
            continue
        op, x, nodes = found
        if rewrites.free(*nodes) and _same_shape(graph, x, node):
            merged = Node(node.name, op, (x,), node.outputs, covering(*nodes))
            rewrites.replace(nodes, [merged], f"together they are {op.kind}")
    return rewrites.apply()


def _same_shape(graph: Graph, x: str, node: Node) -> bool:
    return graph.values[x].shape == graph.values[node.outputs[0]].shape


def _swish(graph: Graph, node: Node):
    for index in (0, 1):
        x, gate = node.inputs[index], graph.producers.get(node.inputs[1 - index])
        if gate is None or gate.inputs[0] != x:
            continue
        if only_user(graph, gate.outputs[0]) is not node:
            continue
        if isinstance(gate.op, Sigmoid):
            return Swish(), x, [gate, node]
        sixth = isinstance(gate.op, HardSigmoid) and math.isclose(
            gate.op.alpha, 1 / 6, rel_tol=1e-6
        )
        if sixth and gate.op.beta == 0.5:
            return HardSwish(), x, [gate, node]
    return None


def _leaky_relu(graph: Graph, node: Node):
    slopes = constant(graph, node, 1) if isinstance(node.op, Prelu) else None
    if (
        slopes is None
        or slopes.dtype.kind != "f"
        or slopes.size == 0
        or (slopes != slopes.flat[0]).any()
    ):
        return None  # several slopes, a NaN among them, or integers, which have no leaky ReLU
    return LeakyRelu(float(slopes.flat[0])), node.inputs[0], [node]


def _number(graph: Graph, name: str | None) -> float | None:
    array = graph.constants.get(name)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def _with_number(graph: Graph, node: Node | None, op: type, number: float) -> str | None:
    """Returns the other input where ``node`` is ``op`` with the constant ``number``; else None."""
    if node is None or type(node.op) is not op:
        return None
    for index in (1, 0) if op is not Div else (1,):
        value = _number(graph, node.inputs[index])
        if value is not None and math.isclose(value, number, rel_tol=1e-6):
            return node.inputs[1 - index]
    return None


def _times(graph: Graph, node: Node | None, number: float) -> str | None:
    found = _with_number(graph, node, Mul, number)
    return found if found is not None else _with_number(graph, node, Div, 1 / number)


def _gelu(graph: Graph, node: Node):
    """Finds 0.5 * x * (1 + erf(x / sqrt 2)) in the three orders that its products are written in."""
    make = graph.producers.get
    last = [node]
    half = _times(graph, node, 0.5)
    if half is not None:  # (x * (1 + erf)) * 0.5
        product = make(half)
        if product is None or type(product.op) is not Mul:
            return None
        last, pair, halved = [product, node], product.inputs, False
    else:
        pair, halved = node.inputs, True
    for index in (0, 1):
        one_more = make(pair[1 - index])
        x, nodes = pair[index], []
        if halved:  # (0.5 * x) * (1 + erf), or x * (0.5 * (1 + erf))
            scaled = make(x) if x is not None else None
            inner = _times(graph, scaled, 0.5)
            if inner is not None:
                x, nodes = inner, [scaled]
            else:
                inner = _times(graph, one_more, 0.5)
                if inner is None:
                    continue
                nodes, one_more = [one_more], make(inner)
        added = _with_number(graph, one_more, Add, 1.0)
        error = make(added) if added is not None else None
        if error is None or not isinstance(error.op, Erf):
            continue
        root = make(error.inputs[0])
        if _times(graph, root, 1 / math.sqrt(2)) != x:
            continue
        found = [root, error, one_more, *nodes, *last]
        inside = {n.name for n in found}
        if all(
            {user.name for user in graph.consumers[n.outputs[0]]} <= inside
            and n.outputs[0] not in graph.outputs
            for n in found[:-1]
        ):
            return Gelu(), x, found
    return None
