"""Matrix products over the channels of images [N, H, W, C], as ConvNeXt has them, as 1x1 convolutions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...operators.binary import Add, Mul
from ...operators.channels_last import Conv2dNhwc
from ...operators.matmul import Matmul
from ..graph import Graph, Node
from .rewriting import Rewrites, absent, constant, covering, only_user


def convolve_products(graph: Graph) -> Graph:
    """Makes products of [N, H, W, C] with constants [C, K] 1x1 convolutions, which take in what follows."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        if type(node.op) is not Matmul or len(graph.values[node.inputs[0]].shape) != 4:
            continue
        weight = constant(graph, node, 1)
        if weight is None or weight.ndim != 2:
            continue
        name = rewrites.fresh(f"{node.name}.weight")
        made = replace(node, op=Conv2dNhwc(), inputs=(node.inputs[0], name))
        turned = np.ascontiguousarray(weight.T)[:, :, None, None]
        rewrites.replace([node], [made], "", {name: turned})
    return rewrites.apply()


def fold_constants_after(graph: Graph) -> Graph:
    """Folds constants a channel that are added to 1x1 convolutions over [N, H, W, C], or multiply them."""
    rewrites = Rewrites(graph)
    for conv in graph.nodes:
        if not _is_open(conv):
            continue
        after = only_user(graph, conv.outputs[0])
        weight, bias = constant(graph, conv, 1), constant(graph, conv, 2)
        if after is None or type(after.op) not in (Add, Mul) or not rewrites.free(conv, after):
            continue
        numbers = _numbers(graph, after, conv.outputs[0])
        if weight is None or numbers is None or (bias is None and not absent(conv, 2)):
            continue
        wide = np.zeros(len(weight)) if bias is None else bias.astype(np.float64)
        names = [rewrites.fresh(f"{conv.name}.{word}") for word in ("weight", "bias")]
        if type(after.op) is Mul:
            wide, scaled = wide * numbers, weight * numbers[:, None, None, None]
        else:
            wide, scaled = wide + numbers, weight
        arrays = (np.ascontiguousarray(a, weight.dtype) for a in (scaled, wide))
        merged = replace(
            conv, inputs=(conv.inputs[0], *names), outputs=after.outputs,
            covers=covering(conv, after),
        )  # fmt: skip
        rewrites.replace(
            [conv, after], [merged], "it is part of the weights", dict(zip(names, arrays, strict=True))
        )  # fmt: skip
    return rewrites.apply()


def _is_open(node: Node) -> bool:
    """Whether ``node`` is a convolution over [N, H, W, C] with nothing but a bias after its sum."""
    op = node.op
    return type(op) is Conv2dNhwc and op.activation is None and all(
        absent(node, place) for place in (3, 4, 5)
    )  # fmt: skip


def _numbers(graph: Graph, node: Node, x: str) -> np.ndarray | None:
    """Returns the constants, one a channel, that ``node`` adds to x or multiplies it with; else None."""
    shape = graph.values[x].shape
    index = 1 if node.inputs[0] == x else 0
    c = constant(graph, node, index)
    if c is None or graph.values[node.outputs[0]].shape != shape:
        return None
    if any(size != 1 for size in c.shape[:-1]) or c.ndim > 4:
        return None
    return np.broadcast_to(c.astype(np.float64).reshape(-1), shape[-1:])
