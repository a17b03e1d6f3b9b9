"""Images with their channels side by side, as the fastest kernels take them.

A layout is a shape here: values become [N, H, W, C], operators read and write them so, and transposes stand
where other operators read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import fields, replace

import numpy as np

from ....operators.average_pool2d import AveragePool2d
from ....operators.binary import Binary
from ....operators.channels_last import (
    TO_FIRST,
    TO_LAST,
    AveragePool2dNhwc,
    Conv2dNhwc,
    MaxPool2dNhwc,
)
from ....operators.conv2d import Conv2d
from ....operators.linear import Linear
from ....operators.max_pool2d import MaxPool2d
from ....operators.norm import BatchNorm
from ....operators.operator import Operator, Shape, axis_in
from ....operators.pad import Pad
from ....operators.quantized import (
    EIGHT_BITS,
    DequantizeLinear,
    DynamicQuantizeLinear,
    Lookup,
    QuantizeLinear,
)
from ....operators.quantized_conv2d import QuantizedConv2d, QuantizedConv2dNhwc
from ....operators.quantized_pointwise import QuantizedAdd, QuantizedMean, QuantizedMul
from ....operators.reduce import Reduce
from ....operators.region import Region
from ....operators.resize import Resize
from ....operators.shaping import (
    Concat,
    DepthToSpace,
    Reshape,
    Slice,
    SpaceToDepth,
    Split,
    Transpose,
)
from ....operators.softmax import Softmax
from ....operators.unary import Unary
from ...graph import Graph, Node, Note
from ..canonical.constants import drop_unused
from ..canonical.identities import drop_identities, merge_shapes
from ..rewriting import only_user

#: A first layer of at most so many channels reads [N, C, H, W] as it is given.
PLANAR_CHANNELS = 4

#: What the first layers round away passes through all others: of a network's convolutions, those that make up
#: this part of its products lose half or more of what its logits lose. Of at most so many FLOPs, 2 us of an
#: H200, they take hardly longer in float32, nor does the very first of so few for each byte that it moves.
FIRST_PART, SHORT_FLOPS, FEW_FLOPS_A_BYTE = 1 / 7, 1 << 28, 10


def channels_last(graph: Graph, shuffles: bool = False, integers: bool = False) -> Graph:
    """Lays images [N, H, W, C] for convolutions with constant weights and the nodes after them.

    Inputs and outputs of the graph keep their shapes.

    Args:
        shuffles: channel shuffles, too. A CPU copies whole planes of [N, C, H, W] sooner.
        integers: only for quantized convolutions, and nodes from 8 bits to 8 bits after them.
    """
    if not any(_is_seed(graph, node, integers) for node in graph.nodes):
        return graph
    layouts = _Layouts(graph, shuffles, integers)
    return drop_identities(merge_shapes(drop_unused(layouts.rewritten())))


def set_compute_dtype(graph: Graph, dtype: str, whole: Collection[str] = ()) -> Graph:
    """Lets kernels round operands of convolutions, gates and linear layers to ``dtype``.

    In tf32 the first convolutions keep float32: see :data:`FIRST_PART`.

    Args:
        whole: nodes that keep float32.
    """
    kept = {*whole, *(_first_convolutions(graph) if dtype == "tf32" else ())}
    nodes = [node for node in graph.nodes if type(node.op) in (Conv2dNhwc, Linear, Region)]

    def rounded(node: Node) -> Operator:
        own = "float32" if node.name in kept else dtype
        if isinstance(node.op, Region):
            return node.op.with_compute_dtype(own)
        return replace(node.op, compute_dtype=own)

    return graph.replaced(nodes, [replace(node, op=rounded(node)) for node in nodes])


def mark_stem(graph: Graph) -> Graph:
    """Marks the convolutions before the first value that several nodes read.

    A network that never branches has none: each of its layers would be one.
    """
    readers = graph.consumers
    branches = (
        place
        for place, node in enumerate(graph.nodes)
        if any(len(readers.get(name, ())) > 1 for name in node.outputs)
    )
    stem = [node for node in graph.nodes[: next(branches, 0)] if type(node.op) is Conv2dNhwc]
    return graph.replaced(stem, [replace(node, op=replace(node.op, stem=True)) for node in stem])


def _first_convolutions(graph: Graph) -> set[str]:
    """Returns the convolutions of the first part of a network's products that float32 makes hardly longer."""
    costs = {
        node.name: graph.cost_of(node)
        for node in graph.nodes
        if type(node.op) is Conv2dNhwc and node.op.groups == 1
    }
    left, found = FIRST_PART * sum(cost.flops for cost in costs.values()), set()
    for place, (name, cost) in enumerate(costs.items()):
        left -= cost.flops
        if left < 0:
            break
        moves = place == 0 and cost.flops <= FEW_FLOPS_A_BYTE * cost.bytes
        if moves or cost.flops <= SHORT_FLOPS:
            found.add(name)
    return found


def _is_seed(graph: Graph, node: Node, integers: bool) -> bool:
    kinds = (QuantizedConv2d,) if integers else (Conv2d, QuantizedConv2d)
    return type(node.op) in kinds and node.inputs[1] in graph.constants


class _Layouts:
    """A graph that is written down again, with a name for each layout of each value.

    Attributes:
        names: (value, whether its channels are last) -> its name so.
    """

    def __init__(self, graph: Graph, shuffles: bool, integers: bool) -> None:
        self.graph, self._shuffles, self._integers = graph, shuffles, integers
        self.names = {(name, False): name for name in graph.values if name not in graph.producers}
        self._nodes: list[Node] = []
        self._notes: list[Note] = []
        self._constants: dict[str, np.ndarray] = {}
        self._taken = set(graph.values) | set(graph.positions)
        self._outputs = set(graph.outputs)

    def rewritten(self) -> Graph:
        """Returns the graph."""
        shuffled: set[str] = set()
        for node in self.graph.nodes:
            if node.name in shuffled:
                continue
            if self._shuffles and type(node.op) is Reshape and self.is_last(node.inputs[0]):
                shuffle = _shuffle_of(self.graph, node)
                shuffled.update(part.name for part in shuffle)
                if shuffle:
                    self._shuffle(*shuffle)
                    continue
            if type(node.op) in (DepthToSpace, SpaceToDepth) and self._turns(node):
                self._blocks(node)
                continue
            op = self._op(node)
            if op is None:
                self._keep(node)
            else:
                self._turn(node, op)
        for name in self.graph.outputs:
            self.value(name, False)
        constants = {**self.graph.constants, **self._constants}
        return replace(
            self.graph, nodes=tuple(self._nodes), constants=constants,
            notes=(*self.graph.notes, *self._notes),
        )  # fmt: skip

    def value(self, name: str, last: bool) -> str:
        """Returns the name of a value in a layout, for which a transpose is added where there is none yet."""
        key = name, last
        if key not in self.names:
            source = self.names[name, not last]
            # An output of the graph keeps its name in the layout that it is asked for in.
            made = name if name in self._outputs and not last else self._fresh(_in(name, last))
            shape = self._shape(name)
            perm = TO_LAST if last else TO_FIRST
            own = shape if last else tuple(shape[axis] for axis in TO_LAST)
            moved = [axis for axis in perm[1:] if own[axis] != 1]  # the batch stays first
            if moved == sorted(moved):
                op: Operator = Reshape(tuple(own[axis] for axis in perm), allow_zero=True)
            else:
                op = Transpose(perm)
            node = Node(self._fresh(f"{made}.{op.kind}"), op, (source,), (made,))
            self._nodes.append(node)
            maker = self.graph.producers.get(name)
            why = f"its channels are {'last' if last else 'first'} for what reads it next"
            self._notes.append(Note(maker.name if maker else name, node.name, why))
            self.names[key] = made
        return self.names[key]

    def is_last(self, name: str | None) -> bool:
        """Whether a value is there with its channels last."""
        return (name, True) in self.names

    def _shape(self, name: str) -> Shape:
        return self.graph.values[name].shape

    def _fresh(self, name: str) -> str:
        while name in self._taken:
            name += "'"
        self._taken.add(name)
        return name

    def _keep(self, node: Node) -> None:
        """Writes ``node`` down as it is."""
        inputs = tuple(None if name is None else self.value(name, False) for name in node.inputs)
        self.names.update(((name, False), name) for name in node.outputs)
        self._nodes.append(replace(node, inputs=inputs))
        if isinstance(node.op, Transpose) and node.op.perm == TO_FIRST:
            self.names[node.outputs[0], True] = inputs[0]  # what it reads has its channels last

    def _turn(self, node: Node, op: Operator) -> None:
        """Writes ``node`` down with images whose channels are last."""
        inputs = tuple(self._input(node, place, op) for place in range(len(node.inputs)))
        self._write(node, op, inputs)

    def _write(self, node: Node, op: Operator, inputs: tuple[str | None, ...]) -> None:
        outputs = []
        for name in node.outputs:
            last = len(self._shape(name)) == 4
            made = self._fresh(_in(name, True)) if last and name in self._outputs else name
            self.names[name, last] = made
            outputs.append(made)
        self._nodes.append(replace(node, op=op, inputs=inputs, outputs=tuple(outputs)))

    def _shuffle(self, apart: Node, turn: Node, back: Node) -> None:
        """Writes down what shuffles channels: in [N, H, W, C] they are the last two of five dimensions."""
        n, _, h, w = self._shape(apart.inputs[0])
        groups, members = self._shape(apart.outputs[0])[1:3]
        both = Reshape((n, h, w, groups, members), allow_zero=True)
        self._write(apart, both, (self.value(apart.inputs[0], True),))
        self._write(turn, Transpose((0, 1, 2, 4, 3)), turn.inputs)
        self._write(back, Reshape((n, h, w, groups * members), allow_zero=True), back.inputs)

    def _turns(self, node: Node) -> bool:
        """Whether ``node`` moves values that this pass lays with their channels last."""
        name = node.inputs[0]
        return self.is_last(name) and not (
            self._integers and self.graph.values[name].dtype not in EIGHT_BITS
        )

    def _blocks(self, node: Node) -> None:
        """Writes down a depth-to-space or its reverse: one transpose of six dimensions."""
        op, (name,) = node.op, node.inputs
        n, c, h, w = self._shape(name)
        b = op.block
        if type(op) is SpaceToDepth:
            apart, perm = (n, h // b, b, w // b, b, c), (0, 1, 3, 2, 4, 5)
        elif op.mode == "DCR":
            apart, perm = (n, h, w, b, b, c // b**2), (0, 1, 3, 2, 4, 5)
        else:
            apart, perm = (n, h, w, c // b**2, b, b), (0, 1, 4, 2, 5, 3)
        made, turned = (self._fresh(f"{name} {word}") for word in ("blocks", "turned"))
        self._nodes += (
            Node(self._fresh(f"{node.name}.blocks"), Reshape(apart, allow_zero=True),
                 (self.value(name, True),), (made,)),
            Node(self._fresh(f"{node.name}.turned"), Transpose(perm), (made,), (turned,)),
        )  # fmt: skip
        n, c, h, w = self._shape(node.outputs[0])
        self._write(node, Reshape((n, h, w, c), allow_zero=True), (turned,))

    def _input(self, node: Node, place: int, op: Operator) -> str | None:
        name = node.inputs[place]
        if name is None:
            return None
        if isinstance(op, Conv2dNhwc):
            images = place == 3 or (place == 0 and not op.planar)
            return self.value(name, True) if images else name
        if type(op) in _QUANTIZED:
            images = place in _QUANTIZED[type(op)] and not (place == 0 and _is_planar(op))
            return self._operand(name) if images else name
        if isinstance(op, Binary):
            return self._operand(name)
        return name if isinstance(op, BatchNorm) and place else self.value(name, True)

    def _operand(self, name: str) -> str:
        """Returns an input of a binary operator, of any rank where it is a constant."""
        array = self.graph.constants.get(name)
        if self.graph.values[name].size == 1 and not self.is_last(name):
            return name
        if array is None:
            return self.value(name, True)
        if (name, True) not in self.names:
            made = self.names[name, True] = self._fresh(_in(name, True))
            wide = array.reshape((1,) * (4 - array.ndim) + array.shape)
            self._constants[made] = np.ascontiguousarray(wide.transpose(TO_LAST))
        return self.names[name, True]

    def _op(self, node: Node) -> Operator | None:
        """Returns the operator of ``node`` over images whose channels are last, or None: it stays."""
        graph, op = self.graph, node.op
        if _is_seed(graph, node, self._integers):
            x = node.inputs[0]
            planar = not self.is_last(x) and op.groups == 1 and self._shape(x)[1] <= PLANAR_CHANNELS
            record = Conv2dNhwc if type(op) is Conv2d else QuantizedConv2dNhwc
            return record(**_attributes(op), planar=planar)
        if not any(self.is_last(name) for name in node.inputs if name not in graph.constants):
            return None
        dtypes = {graph.values[name].dtype for name in (node.inputs[0], *node.outputs)}
        if self._integers and not dtypes <= {*EIGHT_BITS}:
            return None
        reduces = isinstance(op, Reduce | QuantizedMean)
        images = node.outputs[: _IMAGES.get(type(op))]
        if any(len(self._shape(name)) != 4 for name in images) and not reduces:
            return None
        if isinstance(op, Binary) or type(op) in _QUANTIZED:
            places = _QUANTIZED.get(type(op), (0, 1))
            fits = all(
                name in graph.constants
                or len(self._shape(name)) == 4
                or graph.values[name].size == 1
                for name in (node.inputs[place] for place in places)
            )
            if not fits or (type(op) in _OF_CHANNELS and graph.values[node.inputs[1]].size != 1):
                return None
            return _reduce(op, self._shape(node.inputs[0])) if reduces else op
        if isinstance(op, Unary):
            return op
        turn = _TURNS.get(type(op))
        if isinstance(op, Reduce):
            return _reduce(op, graph.values[node.inputs[0]].shape)
        return None if turn is None else turn(op)


def _shuffle_of(graph: Graph, node: Node) -> tuple[Node, ...]:
    """Returns the reshape ``node``, the transpose and the reshape behind it if they are a channel shuffle.

    Of [N, C, H, W] that is [N, groups, C / groups, ...] with these two exchanged (Zhang et al., ShuffleNet).
    """
    apart, turn = node, only_user(graph, node.outputs[0])
    back = None if turn is None else only_user(graph, turn.outputs[0])
    if back is None or type(turn.op) is not Transpose or type(back.op) is not Reshape:
        return ()
    image, shape = (graph.values[name].shape for name in (apart.inputs[0], apart.outputs[0]))
    swapped = turn.op.perm == (0, 2, 1, *range(3, len(shape)))
    if not swapped or graph.values[back.outputs[0]].shape != image:
        return ()
    keeps = shape[0] == image[0] and shape[1] * shape[2] == image[1]
    return (apart, turn, back) if keeps and math.prod(shape[3:]) == math.prod(image[2:]) else ()


def _in(name: str, last: bool) -> str:
    return f"{name} {'NHWC' if last else 'NCHW'}"


def _attributes(op: Operator) -> dict[str, object]:
    return {field.name: getattr(op, field.name) for field in fields(op)}


def _axis(axis: int) -> int:
    """Returns where dimension ``axis`` of [N, C, H, W] is in [N, H, W, C]."""
    return TO_LAST.index(axis_in(axis, 4))


def _is_planar(op: Operator) -> bool:
    return getattr(op, "planar", False)


def _reduce(op: Reduce | QuantizedMean, shape: Shape) -> Operator | None:
    gone = {axis_in(axis, 4) for axis in op.axes}
    kept = [axis for axis in range(4) if axis not in gone]
    ordered = [axis for axis in TO_LAST if axis in kept]
    if not op.keepdims and kept != ordered:
        return None  # what is left has another order
    return replace(op, axes=tuple(sorted(_axis(axis) for axis in gone)))


def _max_pool(op: MaxPool2d) -> Operator | None:
    return MaxPool2dNhwc(**_attributes(op)) if op.indices is None else None


def _pad(op: Pad) -> Operator:
    return replace(op, pads=tuple(op.pads[4 * side + axis] for side in (0, 1) for axis in TO_LAST))


def _resize(op: Resize) -> Operator | None:
    if op.roi:
        return None
    return replace(
        op, sizes=tuple(op.sizes[axis] for axis in TO_LAST),
        scales=tuple(op.scales[axis] for axis in TO_LAST),
    )  # fmt: skip


#: Inputs that are images, of operators whose others are parameters.
_QUANTIZED: dict[type[Operator], tuple[int, ...]] = {
    QuantizedConv2dNhwc: (0, 7), QuantizedAdd: (0, 3), QuantizedMul: (0, 2), QuantizedMean: (0,),
    Lookup: (0,), QuantizeLinear: (0,), DequantizeLinear: (0,), DynamicQuantizeLinear: (0,),
}  # fmt: skip
#: Outputs that are images, of operators whose others are parameters.
_IMAGES: dict[type[Operator], int] = {DynamicQuantizeLinear: 1}
#: Of these, those whose scale may differ along a dimension: they stay then.
_OF_CHANNELS = (QuantizeLinear, DequantizeLinear)

_TURNS: dict[type[Operator], Callable[[Operator], Operator | None]] = {
    MaxPool2d: _max_pool,
    AveragePool2d: lambda op: AveragePool2dNhwc(**_attributes(op)),
    BatchNorm: lambda op: replace(op, axis=-1),
    Concat: lambda op: replace(op, axis=_axis(op.axis)),
    Split: lambda op: replace(op, axis=_axis(op.axis)),
    Softmax: lambda op: replace(op, axis=_axis(op.axis)),
    Slice: lambda op: replace(op, axes=tuple(_axis(axis) for axis in op.axes)),
    Pad: _pad,
    Resize: _resize,
}
