"""The kernels: one table, read by the engine, the command line's help, the docs and the tests.

A family of kernels is a file in this package with its ``ROWS``, and its name in the list below. Among the
rows of one operator on one kind of device the first that can run a node is the fastest: ``auto`` takes it.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..graph.graph import Graph, Node
from ..target import Target
from .cuda.batch_invariance import is_batch_invariant
from .kernel import NO_ONE, Bound, Call, Kernel, functions, on_both
from .numpy import NUMPY

__all__ = [
    "ALIASES", "NO_ONE", "NUMPY", "TABLE", "Bound", "Call", "Kernel", "choose", "functions",
    "is_batch_invariant", "is_variant", "of", "on_both", "why_not_fuse",
]  # fmt: skip

_FAMILIES = (
    "cpu.channels_last", "cpu.quantized", "cuda.channels_last", "convolution", "copies",
    "cuda.bottlenecks", "cuda.conv_pairs", "cuda.conv_pool", "cuda.dense_layer", "cuda.depthwise_means",
    "cuda.depthwise_norm", "cuda.expand_depthwise", "cuda.inverted_residual", "cuda.linear_layers",
    "cuda.linear_mma", "cuda.mean_linear", "cuda.pointwise", "cuda.quantized", "cuda.squeeze_excite",
    "data_movement", "indexed", "norms",
    "pointwise", "pooling", "gemm",
    "recurrent", "sampling", "signal", "softmax", "reductions", "resizing", "fused_network", "openacc",
)  # fmt: skip

TABLE: tuple[Kernel, ...] = tuple(
    row for family in _FAMILIES for row in importlib.import_module(f"{__name__}.{family}").ROWS
)

_BY_OPERATOR: dict[tuple[str, str], list[Kernel]] = {}
for _row in TABLE:
    _BY_OPERATOR.setdefault((_row.op, _row.device), []).append(_row)

_VARIANTS = frozenset(row.name for row in TABLE if row.op == "conv2d")

#: Operators whose output is their input under another shape: nothing is run.
ALIASES = frozenset({"reshape"})


def of(op: str, device: str) -> list[Kernel]:
    """Returns the kernels of an operator on a kind of device, the fastest first."""
    return _BY_OPERATOR.get((op, device), [])


def is_variant(op: str, device: str, variant: str | None) -> bool:
    """Whether an operator has a kernel of that name, which then stands for the user's choice."""
    return any(row.name == variant for row in of(op, device))


def why_not_fuse(
    device: Any, graph: Graph, node: Node, batch_invariant: bool = False
) -> str | None:
    """Returns why no kernel of a device runs a region sooner than others run its nodes, or None.

    Args:
        graph: which has the nodes, and not the region.
        node: the region's.
        batch_invariant: whether only kernels count of which an image's bits are the same in any batch.
    """
    reasons = []
    for row in of(node.op.kind, device.kind):
        reason = row.requires.why_not(device.target)
        if batch_invariant and not is_batch_invariant(row, node, graph):
            reason = reason or "an image's bits depend on the batch"
        reason = reason or row.why_not_fuse(node, graph, device)
        if reason is None:
            return None
        reasons.append(f"{row.name}: {reason}")
    return "; ".join(reasons) or f"no kernel on {device.kind}"


def choose(
    node: Node,
    graph: Graph,
    target: Target,
    variant: str | None = None,
    reduction: bool | None = None,
) -> tuple[Kernel | None, str]:
    """Returns the fastest kernel that can run ``node``, or None and why none can.

    Args:
        target: what runs it; its ``kind`` is the device's.
        variant: a kernel's name; among operators that have one of that name, only it may run, and among
            others none that belongs to another variant.
        reduction: among kernels with and without, only this form may run; None: either.
    """
    device = target.kind
    rows = of(node.op.kind, device)
    if is_variant(node.op.kind, device, variant):
        rows = [row for row in rows if row.name == variant]
    elif variant is not None:
        rows = [row for row in rows if row.name not in _VARIANTS]
    if reduction is not None:
        rows = [row for row in rows if row.reduction in (None, reduction)]
    reasons = []
    for row in rows:
        reason = row.refuses(node, graph, target)
        if reason is None and (row.name == variant or row.automatic(node, graph, target)):
            return row, ""
        reasons.append(f"{row.name}: {reason or 'not for a node of this size'}")
    return None, "; ".join(dict.fromkeys(reasons)) or f"no kernel on {device}"
