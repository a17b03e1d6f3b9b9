"""The kernels in OpenACC directives: the operators of the small networks.

They are called as those of the other devices are, and take their calls' shapes from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.graph import Graph, Node
from . import convolution, gemm, pointwise, pooling, softmax
from .kernel import Bound, Call, Kernel

DEVICE = "openacc"


def _not_one_scale(node: Node, graph: Graph) -> str | None:
    if len(node.op.scale) != 1 or len(node.op.offset) != 1:
        return f"expected one scale and offset for all channels, found {len(node.op.scale)}"
    return None


def _copy(call: Call) -> Bound:
    direction = getattr(call.node.op, "direction", "d2d")
    nbytes = call.inputs[0].nbytes
    if direction == "d2d":
        return call.native("copy_d2d", *call.input_addresses, *call.output_addresses, nbytes)
    return getattr(call.device, f"copy_{direction}"), [
        *call.output_addresses,
        *call.input_addresses,
        nbytes,
    ]


def around(call: Call) -> tuple[Bound, Bound]:
    """Returns steps that open and close a data region around a node: its input comes in, its output goes out.

    It is how ``--data-mode transfer`` places data, as the thesis began.
    """
    sizes = (
        call.input_addresses[0],
        call.inputs[0].nbytes,
        call.output_addresses[0],
        call.outputs[0].nbytes,
    )
    return call.native("enter", *sizes), call.native("leave", *sizes)


def _row(op: str, name: str, make, **options) -> Kernel:
    return Kernel(op, name, DEVICE, make, **options)


def _convolutions() -> Sequence[Kernel]:
    summaries = {row.name: row for row in convolution.ROWS if row.name in ("if", "pad")}
    return [
        _row(
            "conv2d", name, convolution._make(name, reduction), why_not=convolution.why_not,
            reduction=reduction, rewrite=summaries[name].rewrite, summary=summaries[name].summary,
        )
        for name in ("pad", "if")
        for reduction in (True, False)
    ]  # fmt: skip


ROWS = [
    *_convolutions(),
    _row("pad2d", "pad2d", convolution._make_pad),
    _row("relu", "relu", pointwise._make("relu"), in_place=True),
    _row("tanh", "tanh", pointwise._make("tanh"), in_place=True),
    _row(
        "normalize", "normalize", pointwise._make_normalize, dtypes=("uint8",),
        why_not=_not_one_scale,
    ),
    _row("max_pool2d", "max_pool2d", pooling._make, why_not=pooling.why_not),
    *(
        row
        for reduction in (True, False)
        for row in (
            _row(
                "linear", "linear", gemm._make_linear(reduction), reduction=reduction,
                why_not=gemm._not_linear,
            ),
            _row(
                "softmax", "softmax", softmax._make(reduction), reduction=reduction, in_place=True,
                why_not=softmax._why_not,
            ),
        )
    ),
    _row("copy", "copy", _copy, dtypes=()),
]  # fmt: skip
