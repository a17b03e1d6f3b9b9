"""Matrix products with constants: of images [N, H, W, C] and rows [N, T, C] as 1x1 convolutions, of [N, C] as
linear layers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....operators.binary import Add, Mul
from ....operators.channels_last import Conv2dNhwc
from ....operators.linear import Linear
from ....operators.matmul import Matmul
from ....operators.shaping import Reshape
from ...graph import Graph, Node
from ...mapped import read
from ..fuse.epilogues import FUNCTIONS
from ..rewriting import Rewrites, absent, constant, covering, folded, only_user, wide


def convolve_matmuls(graph: Graph) -> Graph:
    """Turns products of [N, H, W, C] with constants [C, K] into 1x1 convolutions, which can be fused."""
    rewrites, known = Rewrites(graph), {}
    for node in graph.nodes:
        if type(node.op) is not Matmul or len(graph.values[node.inputs[0]].shape) != 4:
            continue
        weight = constant(graph, node, 1)
        if weight is None or weight.ndim != 2:
            continue
        name, turned = _turned(rewrites, node, known)
        made = replace(node, op=Conv2dNhwc(), inputs=(node.inputs[0], name))
        rewrites.replace([node], [made], "", {name: turned})
    return rewrites.apply()


def _turned(
    rewrites: Rewrites, node: Node, known: dict[str, tuple[str, np.ndarray]]
) -> tuple[str, np.ndarray]:
    """Returns a product's weights [C, K] as a convolution's, and their name: one for all that read them."""
    source = node.inputs[1]
    if source not in known:
        turned = np.ascontiguousarray(read(rewrites.graph.constants[source]).T)[:, :, None, None]
        known[source] = rewrites.fresh(f"{node.name}.weight"), turned
    return known[source]


def convolve_rows(graph: Graph) -> Graph:
    """Makes products of rows [N, T, C] with constants [C, K] 1x1 convolutions over [N, T, 1, C].

    Each takes in a constant row that is added to it, and then a function or rows that are: what a transformer
    does to its tokens. The reshapes before and behind it move nothing.
    """
    rewrites, known = Rewrites(graph), {}
    for node in graph.nodes:
        weight = constant(graph, node, 1) if type(node.op) is Matmul else None
        if weight is None or weight.ndim != 2 or not weight.size:
            continue
        shape = graph.values[node.inputs[0]].shape
        if len(shape) != 3 or not shape[1] or not rewrites.free(node):
            continue
        gone, bias, function, residual = [node], None, None, None
        after = _next(graph, rewrites, gone)
        if after is not None and type(after.op) is Add:
            bias = _numbers(graph, after, gone[-1].outputs[0])
            if bias is not None:
                gone.append(after)
                after = _next(graph, rewrites, gone)
        if after is not None and after.op.kind in FUNCTIONS:
            function = after.op
            gone.append(after)
        elif after is not None and type(after.op) is Add:
            residual = _other(graph, after, gone[-1].outputs[0])
            if residual is not None:
                gone.append(after)
        x, (output,) = node.inputs[0], gone[-1].outputs
        name, turned = _turned(rewrites, node, known)
        names, constants = [name, None], {name: turned}
        if bias is not None:
            names[1] = rewrites.fresh(f"{node.name}.bias")
            constants[names[1]] = np.ascontiguousarray(bias, weight.dtype)
        views = {name: _image(graph, rewrites, node, name) for name in (x, residual) if name}
        inputs = [views[x].outputs[0], *names]
        if residual is not None:
            inputs.append(views[residual].outputs[0])
        sums = rewrites.fresh(f"{node.name}.sums")
        conv = replace(
            node, op=Conv2dNhwc(activation=function), outputs=(sums,), covers=covering(*gone),
            inputs=tuple(inputs if inputs[-1] is not None else inputs[:-1]),
        )  # fmt: skip
        back = Node(
            rewrites.fresh(f"{node.name}.back"), Reshape(graph.values[output].shape), (sums,), (output,)
        )  # fmt: skip
        why = "it is part of a convolution of rows"
        rewrites.replace(gone, [conv, *views.values(), back], why, constants)
    return rewrites.apply()


def linear_matmuls(graph: Graph) -> Graph:
    """Makes products of rows [N, C] with constants [C, K] linear layers, whose weights are packed once.

    A constant row that is added becomes the bias.
    """
    rewrites, known = Rewrites(graph), {}
    for node in graph.nodes:
        weight = constant(graph, node, 1) if type(node.op) is Matmul else None
        if weight is None or weight.ndim != 2 or not weight.size or weight.dtype.kind != "f":
            continue
        if len(graph.values[node.inputs[0]].shape) != 2 or not rewrites.free(node):
            continue
        name, turned = _turned(rewrites, node, known)
        gone, names, constants = [node], [node.inputs[0], name], {name: turned[:, :, 0, 0]}
        after = _next(graph, rewrites, gone)
        if after is not None and type(after.op) is Add:
            bias = _numbers(graph, after, node.outputs[0])
            if bias is not None:
                names.append(rewrites.fresh(f"{node.name}.bias"))
                constants[names[-1]] = np.ascontiguousarray(bias, weight.dtype)
                gone.append(after)
        made = replace(
            node, op=Linear(), inputs=tuple(names), outputs=gone[-1].outputs, covers=covering(*gone)
        )
        rewrites.replace(gone, [made], "it is part of a linear layer", constants)
    return rewrites.apply()


def _image(graph: Graph, rewrites: Rewrites, node: Node, rows: str) -> Node:
    """Returns the node that makes images of one column of what ``node`` reads."""
    n, positions, channels = graph.values[rows].shape
    name = rewrites.fresh(f"{node.name}.of.{rows}")
    return Node(name, Reshape((n, positions, 1, channels)), (rows,), (name,))


def _next(graph: Graph, rewrites: Rewrites, nodes: list[Node]) -> Node | None:
    """Returns the node that alone reads what the last of ``nodes`` makes, where no rewrite has it."""
    after = only_user(graph, nodes[-1].outputs[0])
    return after if after is not None and rewrites.free(after) else None


def _other(graph: Graph, add: Node, x: str) -> str | None:
    """Returns what of the same shape ``add`` adds to x that is no constant, or None."""
    a, b = add.inputs
    other = b if a == x else a
    same = graph.values[other].shape == graph.values[x].shape
    return other if same and other != x and other not in graph.constants else None


def fold_constants_after(graph: Graph) -> Graph:
    """Folds constants a channel that are added to 1x1 convolutions over [N, H, W, C], or multiply them."""
    rewrites = Rewrites(graph)
    for conv in graph.nodes:
        weight, bias = constant(graph, conv, 1), constant(graph, conv, 2)
        if not _is_open(conv) or weight is None or (bias is None and not absent(conv, 2)):
            continue
        run: list[Node] = []  # of constants, as many as can be part of the weights
        while (after := only_user(graph, (run or [conv])[-1].outputs[0])) is not None:
            numbers = None
            if type(after.op) in (Add, Mul) and rewrites.free(conv, after):
                numbers = _numbers(graph, after, (run or [conv])[-1].outputs[0])
            made = None if numbers is None else _folded(after, weight, bias, numbers)
            if made is None:
                break
            weight, bias = made
            run.append(after)
        if not run:
            continue
        names = [rewrites.fresh(f"{conv.name}.{word}") for word in ("weight", "bias")]
        merged = replace(
            conv, inputs=(conv.inputs[0], *names), outputs=run[-1].outputs,
            covers=covering(conv, *run),
        )  # fmt: skip
        constants = dict(zip(names, (weight, bias), strict=True))
        rewrites.replace([conv, *run], [merged], "it is part of the weights", constants)
    return rewrites.apply()


def _folded(
    after: Node, weight: np.ndarray, bias: np.ndarray | None, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns weights and bias that also add ``numbers`` or multiply with them; None: they have no room."""
    sums = np.zeros(len(weight)) if bias is None else bias.astype(np.float64)
    scaled: np.ndarray | None = weight
    with np.errstate(all="ignore"):
        if type(after.op) is Add:
            sums = sums + numbers
        else:
            sums = sums * numbers
            exact = wide(weight) * numbers[:, None, None, None]
            scaled = folded(exact, weight.dtype, apart=1, beside=sums)
    shift = folded(sums, weight.dtype)
    return None if scaled is None or shift is None else (scaled, shift)


def _is_open(node: Node) -> bool:
    """Whether ``node`` is a convolution over [N, H, W, C] with nothing but a bias after its sum."""
    op = node.op
    return type(op) is Conv2dNhwc and op.activation is None and all(
        absent(node, place) for place in (3, 4, 5)
    )  # fmt: skip


def _numbers(graph: Graph, node: Node, x: str) -> np.ndarray | None:
    """Returns the constants, one per channel, that ``node`` adds to x or multiplies it with; else None."""
    shape = graph.values[x].shape
    index = 1 if node.inputs[0] == x else 0
    c = constant(graph, node, index)
    if c is None or graph.values[node.outputs[0]].shape != shape:
        return None
    if any(size != 1 for size in c.shape[:-1]) or c.ndim > 4:
        return None
    return np.broadcast_to(c.astype(np.float64).reshape(-1), shape[-1:])
