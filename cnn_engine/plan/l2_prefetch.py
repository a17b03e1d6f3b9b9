"""Weights that come into a GPU's second-level cache while the first kernels of a pass compute.

A layer with more weights than that cache keeps sweeps it in each pass, as the first linear layer of a VGG
does. The convolutions of the next pass then wait for memory for theirs, which has nothing to do while the
first ones multiply. So a branch of the pass's graph asks for them there; and for pieces of the layer that
sweeps, so that memory and the cache are read beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ..devices import Buffer
from ..graph.graph import Node
from ..lower.lowering import Program
from ..lower.placement import Placed
from .plan import Step

#: Bytes of weights that sweep the cache: of those ``linear_rows`` says itself that they are read once.
SWEEPING = 64 << 20

#: Kernels before the branch, and behind it those that read their own weights as soon. Each request begins
#: where one of the pass's kernels ends, so that the last one, for what sweeps, begins long before that layer.
BEFORE, AFTER = 1, 5

#: In multiples of so many bytes memory is asked for.
UNIT = 16

#: Rows that a multiprocessor's warps multiply at a time (``linear_rows_stream.cuh``).
ROWS_AT_A_TIME = 8


@dataclass(frozen=True)
class Request:
    """Memory that is asked for, as ``csrc/runtime/prefetch.h`` has it.

    Attributes:
        address, rows, row_bytes: where it is.
        together, every: of groups of so many rows, one piece in so many.
    """

    address: int
    rows: int
    row_bytes: int
    together: int = 1
    every: int = 1


@dataclass(frozen=True)
class Branch:
    """A branch of a pass that prefetches weights while its steps run.

    Attributes:
        step: before which the branch begins.
        requests: one after another: together they would take the memory from the kernels beside them.
    """

    step: Step
    requests: tuple[Request, ...]

    def run(self, kernels: Any, stream: int) -> None:
        """Queues the requests."""
        for request in self.requests:
            kernels.prefetch(*astuple(request), stream)


def plan(program: Program, placed: Placed, steps: Sequence[Step]) -> Branch | None:
    """Returns which weights the graph of a pass prefetches into the second-level cache, or None.

    It gains where a row by itself sweeps, as more rows do not wait for memory alone, and where what the
    kernels between the branch and that layer read fits into half of the cache.
    """
    graph, device = placed.graph, program.placement.device
    nodes = {node.name: node for node in graph.nodes}
    here = [step for step in steps if step.place == "cuda" and step.kernel]
    weights = [_weights(program, placed, nodes[step.name]) for step in here]
    first_swept = next((i for i, one in enumerate(weights) if one and one.nbytes >= SWEEPING), None)
    if first_swept is None:
        return None
    node, swept = nodes[here[first_swept].name], weights[first_swept]
    outputs = graph.values[node.outputs[0]].shape[-1]
    if node.op.kind != "linear" or graph.values[node.inputs[0]].shape[0] != 1:
        return None
    asked = [one for one in weights[BEFORE + AFTER : first_swept] if one is not None]
    cache = device.properties["cache_bytes"]
    if not 0 < sum(one.nbytes for one in asked) <= cache // 2:
        return None
    requests = [Request(one.address, 1, one.nbytes // UNIT * UNIT) for one in asked]
    row_bytes, rest = divmod(swept.nbytes, outputs)
    if rest == row_bytes % UNIT == 0:
        together = ROWS_AT_A_TIME * device.properties["multiprocessors"]
        every = -(-swept.nbytes // (cache // 3))
        requests.append(Request(swept.address, outputs, row_bytes, together, every))
    return Branch(here[BEFORE], tuple(requests))


def _weights(program: Program, placed: Placed, node: Node) -> Buffer | None:
    """Returns what the kernel of a node made of its weights."""
    kernel = placed.kernels[node.name]
    made = kernel.prepare and program.prepared(placed.graph, node, kernel)
    return made if isinstance(made, Buffer) else None
