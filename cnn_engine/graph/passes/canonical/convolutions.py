"""Convolutions that have no fast kernels as ones that have: transposed ones, and those of volumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ....operators.channels_last import TO_FIRST, TO_LAST
from ....operators.conv2d import Conv2d, Conv3d
from ....operators.conv_transpose2d import ConvTranspose2d
from ....operators.gather import Gather
from ....operators.operator import Operator
from ....operators.pad import Pad
from ....operators.shaping import Concat, Expand, Reshape, Slice, Transpose
from ....operators.unary import Unary
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, constant, covering

#: Products that a transposed convolution may become where all phases have the taps of the one that has most,
#: for each that it has: on a CPU, and on CUDA, whose tensor cores multiply at many times the rate of the
#: kernel with a thread for each output.
MOST_MULTIPLICATIONS, MOST_ON_CUDA = 4, 16

#: Of fewer FLOPs per image, that kernel ends before the launches of a convolution and of three copies around
#: it: 0.27 TFLOP/s were measured on an H200, and a launch takes 1 us.
LEAST_FLOPS_ON_CUDA = 1 << 20


class _Chain:
    """Nodes one after the other, in the place of one; the last makes what that one made."""

    def __init__(self, rewrites: Rewrites, node: Node) -> None:
        self._rewrites, self._node = rewrites, node
        self._steps: list[tuple[Operator, tuple[str | None, ...]]] = []
        self._parts: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}

    def _named(self, op: Operator, arrays: Sequence[np.ndarray | None]) -> tuple[str | None, ...]:
        names: list[str | None] = []
        for array in arrays:
            name = None
            if array is not None:
                name = self._rewrites.fresh(f"{self._node.name}.{op.kind}.{len(names) + 1}")
                self.constants[name] = np.ascontiguousarray(array)
            names.append(name)
        return tuple(names)

    def add(self, op: Operator, *others: np.ndarray | None) -> None:
        """Adds ``op``, whose inputs are what the one before it makes, and constants."""
        self._steps.append((op, self._named(op, others)))

    def add_part(self, op: Operator, *others: np.ndarray | None, reads: bool = True) -> None:
        """Adds ``op``, whose inputs are what the node reads, unless it reads nothing, and constants.

        Parts stand before the other nodes, of which the first joins them.
        """
        inputs = (*self._node.inputs[:1][: int(reads)], *self._named(op, others))
        output = self._rewrites.fresh(f"{self._node.name}.{op.kind}")
        first = reads and all(part.name != self._node.name for part in self._parts)
        name, covers = (
            (self._node.name, covering(self._node)) if first else (f"{output}/{op.kind}", ())
        )
        self._parts.append(Node(name, op, inputs, (output,), covers))

    def __len__(self) -> int:
        return len(self._steps)

    def replace(self, why: str) -> None:
        node, made, value = self._node, list(self._parts), self._node.inputs[0]
        for place, (op, names) in enumerate(self._steps):
            last = place == len(self._steps) - 1
            output = node.outputs[0] if last else self._rewrites.fresh(f"{node.name}.{op.kind}")
            named = op.kind == "conv2d"
            joined = tuple(part.outputs[0] for part in self._parts) if place == 0 else ()
            made.append(
                Node(
                    node.name if named else f"{output}/{op.kind}", op, joined or (value, *names),
                    (output,), covering(node) if named else (),
                )
            )  # fmt: skip
            value = output
        made.sort(key=lambda one: one.name != node.name)  # the first stands for what goes
        self._rewrites.replace([node], made, why, self.constants)


def convolve_phases(
    graph: Graph, most: int = MOST_MULTIPLICATIONS, least_flops: int = 0, *, zeros: bool = False
) -> Graph:
    """Makes transposed convolutions of images ordinary ones, which make the phases of a stride.

    An output row o is m * stride + p: for every phase p, a sum over the few input rows near m. The phases are
    filters of one convolution, or each its own where they have other taps. They are put side by side
    afterwards.

    Args:
        most: the multiplications that one may become, zeros included, for each that it has.
        zeros: whether phases of other taps are one convolution's too, with zeros as weights. Its outputs are
            NaN where such a weight meets an infinity or NaN, which the transposed one does not read.
        least_flops: an image's, below which one stays as it is, unless it reads a convolution's output: its
            channels lie side by side then, and the kernel of transposed ones reads planes.
    """
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        if type(node.op) is ConvTranspose2d and len(node.outputs) == 1:
            images = graph.values[node.inputs[0]].shape[0]
            is_large = graph.cost_of(node).flops >= images * least_flops
            if is_large or _reads_a_convolution(node, rewrites):
                _convolve_phases(graph, node, rewrites, most, zeros)
    return rewrites.apply()


def _reads_a_convolution(node: Node, rewrites: Rewrites) -> bool:
    """Whether ``node`` reads what a convolution makes, be it through functions."""
    maker = rewrites.graph.producers.get(node.inputs[0])
    while maker is not None and isinstance(maker.op, Unary):
        maker = rewrites.graph.producers.get(maker.inputs[0])
    return maker is not None and (type(maker.op) is Conv2d or not rewrites.free(maker))


def _convolve_phases(graph: Graph, node: Node, rewrites: Rewrites, most: int, zeros: bool) -> None:
    op, weight, bias = node.op, constant(graph, node, 1), constant(graph, node, 2)
    if weight is None or (bias is None and not absent(node, 2)) or op.activation is not None:
        return
    n, channels, *sizes = graph.values[node.inputs[0]].shape
    outputs = tuple(graph.values[node.outputs[0]].shape[2:])
    groups, filters, kernel = op.groups, weight.shape[1], weight.shape[2:]
    if n == 0 or min(op.padding) < 0 or channels == groups == groups * filters:
        return  # of one channel each: little to multiply, and twice as much to move
    # Each axis: taps of a phase, and rows of the input that stand before and behind what there is.
    taps, spread, before, after, first = [], [], [], [], []
    for axis in range(2):
        stride, dilation = op.stride[axis], op.dilation[axis]
        count = kernel[axis] if stride == 1 else -(-(dilation * (kernel[axis] - 1) + 1) // stride)
        step = dilation if stride == 1 else 1
        reach = step * (count - 1)
        low = max(reach - op.padding[axis] // stride, 0)
        cut = op.padding[axis] - (reach - low) * stride
        made = -(-(cut + outputs[axis]) // stride)
        taps.append(count)
        spread.append(step)
        before.append(low)
        after.append(max(made + reach - low - sizes[axis], 0))
        first.append(cut)
    multiplications = math.prod(taps) * math.prod(op.stride)
    if multiplications > most * math.prod(kernel):
        return
    if multiplications > math.prod(kernel) and not zeros:
        _convolve_each_phase(graph, node, rewrites, weight, bias)
        return
    phases = op.stride
    wide = np.zeros(
        (channels, filters, *(count * step for count, step in zip(taps, phases, strict=True))),
        weight.dtype,
    )
    strided = [1 if step == 1 else d for step, d in zip(op.stride, op.dilation, strict=True)]
    wide[
        :, :, : strided[0] * (kernel[0] - 1) + 1 : strided[0],
        : strided[1] * (kernel[1] - 1) + 1 : strided[1],
    ] = weight  # fmt: skip
    # [g, c, k, tap, phase, tap, phase] -> [g, phase, phase, k, c, tap, tap], the last taps first.
    split = (groups, channels // groups, filters, taps[0], phases[0], taps[1], phases[1])
    turned = wide.reshape(split).transpose(0, 4, 6, 2, 1, 3, 5)[..., ::-1, ::-1]
    turned = turned.reshape(-1, channels // groups, *taps)
    if bias is not None:
        bias = np.broadcast_to(
            bias.reshape(groups, 1, 1, filters), (groups, *phases, filters)
        ).reshape(-1)
    chain = _Chain(rewrites, node)
    chain.add(
        Conv2d((1, 1), (*before, *after), tuple(spread), groups),
        turned,
        *[bias] * (bias is not None),
    )
    rows, columns = (
        size + low + high - step * (count - 1)
        for size, low, high, step, count in zip(sizes, before, after, spread, taps, strict=True)
    )
    # Where channels are side by side, as convolutions leave them, phases are put apart by whole runs.
    if phases != (1, 1) or (rows, columns) != outputs:
        chain.add(Transpose(TO_LAST))
    if phases != (1, 1):
        chain.add(Reshape((n, rows, columns, groups, *phases, filters)))
        chain.add(Transpose((0, 1, 4, 2, 5, 3, 6)))
        rows, columns = rows * phases[0], columns * phases[1]
        chain.add(Reshape((n, rows, columns, groups * filters)))
    _cut_out(chain, (rows, columns), first, outputs)
    if len(chain) > 1:
        chain.add(Transpose(TO_FIRST))
    chain.replace("all phases of its stride are one convolution's filters")


def _cut_out(
    chain: _Chain, made: tuple[int, int], first: Sequence[int], outputs: tuple[int, ...]
) -> None:
    """Adds a slice of images whose channels lie side by side, unless it takes all of them."""
    if made != outputs:
        ends = tuple(cut + size for cut, size in zip(first, outputs, strict=True))
        chain.add(Slice(tuple(first), ends, (1, 2), (1, 1)))


@dataclass(frozen=True)
class _Phase:
    """Along one axis: an output at m * stride + p is a sum over x[m - first - step * j] * weight[taps[j]]."""

    taps: tuple[int, ...]
    first: int
    step: int

    @staticmethod
    def of(p: int, kernel: int, stride: int, dilation: int) -> _Phase:
        taps = tuple(t for t in range(kernel) if (t * dilation - p) % stride == 0)
        first = (taps[0] * dilation - p) // stride if taps else 0
        step = (taps[1] - taps[0]) * dilation // stride if len(taps) > 1 else 1
        return _Phase(taps, first, step)

    @property
    def reach(self) -> int:
        """How far before m the first row lies that it reads."""
        return self.first + self.step * (len(self.taps) - 1)


def _convolve_each_phase(
    graph: Graph, node: Node, rewrites: Rewrites, weight: np.ndarray, bias: np.ndarray | None
) -> None:
    op = node.op
    n, channels, *sizes = graph.values[node.inputs[0]].shape
    outputs = tuple(graph.values[node.outputs[0]].shape[2:])
    groups, filters, kernel = op.groups, weight.shape[1], weight.shape[2:]
    phases, begins, made, cuts = [], [], [], []
    for axis in range(2):
        stride, padding = op.stride[axis], op.padding[axis]
        of_axis = [_Phase.of(p, kernel[axis], stride, op.dilation[axis]) for p in range(stride)]
        reading = [phase for phase in of_axis if phase.taps]
        # All phases are made for the same m, from one on whose rows none cuts off.
        begin = min(padding // stride, *(phase.reach for phase in reading))
        cut = padding - begin * stride
        enough = sizes[axis] + max(phase.first for phase in reading) - begin
        phases.append(of_axis)
        begins.append(begin)
        made.append(max(-(-(cut + outputs[axis]) // stride), enough))
        cuts.append(cut)
    chain = _Chain(rewrites, node)
    grouped = weight.reshape(groups, channels // groups, filters, *kernel).swapaxes(1, 2)
    for both in product(*phases):
        if not all(phase.taps for phase in both):
            alone = np.zeros(groups * filters, weight.dtype) if bias is None else bias
            shape = (n, groups * filters, *made)
            chain.add_part(Expand(shape), alone.reshape(1, -1, 1, 1), reads=False)
            continue
        before = [phase.reach - begin for phase, begin in zip(both, begins, strict=True)]
        after = [
            begin + count - phase.first - size
            for phase, begin, count, size in zip(both, begins, made, sizes, strict=True)
        ]
        rows, columns = (phase.taps[::-1] for phase in both)
        taken = grouped[:, :, :, rows][..., columns]
        chain.add_part(
            Conv2d((1, 1), (*before, *after), tuple(phase.step for phase in both), groups),
            taken.reshape(groups * filters, *taken.shape[2:]),
            *[bias] * (bias is not None),
        )
    chain.add(Concat(1))
    chain.add(Transpose(TO_LAST))
    chain.add(Reshape((n, *made, *op.stride, groups * filters)))
    chain.add(Transpose((0, 1, 3, 2, 4, 5)))
    spread = tuple(count * stride for count, stride in zip(made, op.stride, strict=True))
    chain.add(Reshape((n, *spread, groups * filters)))
    _cut_out(chain, spread, cuts, outputs)
    chain.add(Transpose(TO_FIRST))
    chain.replace("each phase of its stride is a convolution of the taps that it has")


def flatten_depth(graph: Graph) -> Graph:
    """Makes convolutions of volumes ones of images, whose channels are all planes that a window reads."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        weight = constant(graph, node, 1) if type(node.op) is Conv3d else None
        if weight is not None and len(node.inputs) <= 3:
            _flatten_depth(graph, node, weight, rewrites)
    return rewrites.apply()


def _flatten_depth(graph: Graph, node: Node, weight: np.ndarray, rewrites: Rewrites) -> None:
    op, bias = node.op, constant(graph, node, 2)
    if bias is None and not absent(node, 2):
        return
    n, channels, depth, *sizes = graph.values[node.inputs[0]].shape
    _, filters, planes, *positions = graph.values[node.outputs[0]].shape
    if n == 0:
        return
    chain = _Chain(rewrites, node)
    front, back = op.padding[0], op.padding[3]
    if front or back:
        chain.add(Pad((0, 0, front, 0, 0, 0, 0, back, 0, 0)))
    taps = weight.shape[2]
    if taps > 1 or planes != depth:
        first = np.arange(planes)[:, None] * op.stride[0]
        chain.add(Gather(2), first + np.arange(taps) * op.dilation[0])
        chain.add(Transpose((0, 2, 1, 3, 4, 5)))
    else:
        chain.add(Transpose((0, 2, 1, 3, 4)))
    chain.add(Reshape((n * planes, channels * taps, *sizes)))
    flat = Conv2d(
        op.stride[1:], (*op.padding[1:3], *op.padding[4:6]), op.dilation[1:], op.groups,
        op.activation,
    )  # fmt: skip
    kernel = weight.reshape(filters, -1, *weight.shape[3:])
    chain.add(flat, kernel, *[bias] * (bias is not None))
    chain.add(Reshape((n, planes, filters, *positions)))
    chain.add(Transpose((0, 2, 1, 3, 4)))
    chain.replace("planes that a window reads are channels of an image")


def lower_convolutions(graph: Graph) -> Graph:
    """Returns ``graph`` with every convolution as one of images, which a CPU's kernels know: see above."""
    return flatten_depth(convolve_phases(graph))
