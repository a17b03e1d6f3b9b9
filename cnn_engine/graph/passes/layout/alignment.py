"""Pads channels to the vector width with filters of zeros, where kernels need aligned channels.

Values that know their channels one by one, between convolutions, are a class that gets as many channels. What
is added is zero until a function makes other numbers of it, always finite; convolutions that read it have
weights of zero for it. Parts of its channels that are values of other classes, by concatenations, splits and
slices, are filled up by themselves.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from ....operators import unary
from ....operators.average_pool2d import AveragePool2d
from ....operators.binary import Add, Mul, Sub
from ....operators.conv2d import Conv2d
from ....operators.max_pool2d import MaxPool2d
from ....operators.norm import BatchNorm
from ....operators.reduce import ReduceMax, ReduceMean
from ....operators.resize import Resize
from ....operators.shaping import Concat, Slice, Split
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, constant, covering, only_user

CHANNELS = 1  # their dimension

#: Those that make finite numbers of all finite ones.
FUNCTIONS = (
    unary.Clip, unary.Elu, unary.Erf, unary.Gelu, unary.HardSigmoid, unary.HardSwish, unary.LeakyRelu,
    unary.Mish, unary.Relu, unary.Sigmoid, unary.Swish, unary.Tanh,
)  # fmt: skip

#: The channels that all kernels for images can read, gates' too.
RUN = 8

#: How many times as large the values that change together may become: more would cost what whole runs save.
MOST = 1.5


def align_channels(graph: Graph, run: int) -> Graph:
    """Gives images that have no multiple of ``run`` channels one of :data:`RUN`, where all readers allow it.

    A sum of an image's first channels with another image, and its other channels behind it, as ReXNet has,
    becomes the sum of both.
    """
    if not any(type(node.op) is Conv2d for node in graph.nodes):
        return graph
    return _Alignment(graph, run).rewritten()


@dataclass
class _Sum:
    """A concatenation of a sum of an image's first channels and of its other channels.

    Attributes:
        both: the sum of both images, which stands for it.
        parts: what goes with it: the sum of some channels, and the slices of the image.
    """

    both: Node
    parts: tuple[Node, Node, Node]


def _whole_sums(graph: Graph) -> dict[str, _Sum]:
    """Returns such concatenations by their names."""
    found = {}
    for node in graph.nodes:
        if type(node.op) is not Concat or node.op.axis != CHANNELS or len(node.inputs) != 2:
            continue
        added, rest = (_only_maker(graph, name) for name in node.inputs)
        if added is None or rest is None or type(added.op) is not Add or len(added.inputs) != 2:
            continue
        for name in added.inputs:
            first = _only_maker(graph, name)
            if first is None or first.inputs[0] != rest.inputs[0]:
                continue
            taken, left = _taken(graph, first), _taken(graph, rest)
            shapes = {graph.values[name].shape for name in added.inputs}
            if not taken or left is None or len(shapes) != 1:
                continue
            whole = rest.inputs[0]
            channels = graph.values[whole].shape[CHANNELS]
            if taken == range(len(taken)) and left == range(len(taken), channels):
                terms = tuple(whole if term == name else term for term in added.inputs)
                covers = covering(node, added, first, rest)
                both = Node(node.name, Add(), terms, node.outputs, covers)
                found[node.name] = _Sum(both, (added, first, rest))
    return found


def _only_maker(graph: Graph, name: str) -> Node | None:
    maker = graph.producers.get(name)
    return None if maker is None or only_user(graph, name) is None else maker


def _taken(graph: Graph, node: Node) -> range | None:
    """Returns the channels that a slice of nothing else takes."""
    if type(node.op) is not Slice or len(graph.values[node.inputs[0]].shape) < 3:
        return None
    shape = graph.values[node.inputs[0]].shape
    taken = node.op.taken(shape)
    channels = taken.pop(CHANNELS, range(shape[CHANNELS]))
    return channels if all(taken[axis] == range(shape[axis]) for axis in taken) else None


@dataclass
class _Layout:
    """Where the channels of a class are, and how many it has then."""

    positions: np.ndarray
    width: int

    def spread(self, array: np.ndarray, axis: int, rest: float = 0) -> np.ndarray:
        """Returns ``array``, of one number per channel along ``axis``, with ``rest`` between them."""
        shape = list(array.shape)
        shape[axis] = self.width
        found = np.full(shape, rest, array.dtype)
        index = [slice(None)] * array.ndim
        index[axis] = self.positions[: array.shape[axis]]
        found[tuple(index)] = array
        return found


class _Forest:
    """Sets of names, each known by one of its own."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def root(self, name: str) -> str:
        while (parent := self._parents.get(name, name)) != name:
            self._parents[name] = self._parents.get(parent, parent)
            name = parent
        return name

    def join(self, *names: str) -> None:
        first, *others = map(self.root, names)
        for other in others:
            self._parents[other] = first


@dataclass
class _Class:
    """Values that have the same channels.

    Attributes:
        names: of the values.
        cuts: where parts end that are values of other classes.
    """

    names: set[str] = field(default_factory=set)
    cuts: set[int] = field(default_factory=set)


class _Alignment:
    """What has the same channels in one graph, and what of it are parts of others."""

    def __init__(self, graph: Graph, run: int) -> None:
        self.graph = graph
        self.run = run
        self._values = _Forest()
        # Values whose classes stay as they are.
        self._kept = {value.name for value in graph.inputs} | set(graph.outputs)
        self._parts: list[tuple[str, int, str]] = []  # a value, where in it, which value is there
        self._sums = _whole_sums(graph)
        while not self._sums.keys() <= (adding := self._sums_with_zeros()):
            self._sums = {name: one for name, one in self._sums.items() if name in adding}
        self._find_classes()

    def rewritten(self) -> Graph:
        layouts = self._layouts()
        if not layouts:
            return self.graph
        rewrites = Rewrites(self.graph)
        for node in self.graph.nodes:
            self._widen(node, layouts, rewrites)
        return rewrites.apply()

    def _channels(self, name: str) -> int:
        return self.graph.values[name].shape[CHANNELS]

    # ---- which values have the same channels ----

    def _find_classes(self) -> None:
        inner = {part.name for one in self._sums.values() for part in one.parts}
        for node in self.graph.nodes:
            if node.name in self._sums:
                self._values.join(*self._sums[node.name].both.inputs, node.outputs[0])
            elif node.name not in inner and not self._is_channelwise(node):
                self._kept.update(name for name in (*node.inputs, *node.outputs) if name)

    def _is_channelwise(self, node: Node) -> bool:
        """Whether ``node`` can have more channels; joins the classes of those that are the same."""
        op, x, y = node.op, node.inputs[0], node.outputs[0]
        if any(len(self.graph.values[name].shape) != 4 for name in (x, *node.outputs) if name):
            return False
        if type(op) in (Add, Sub, Mul):
            return self._joins_terms(node)
        if x in self.graph.constants:
            return False
        if type(op) is Conv2d:
            return self._joins_convolution(node)
        if type(op) in (Concat, Split, Slice):
            return self._joins_parts(node)
        if type(op) is BatchNorm:
            known = [constant(self.graph, node, place) is not None for place in range(1, 5)]
            if not all(known) or op.axis != CHANNELS:
                return False
        elif type(op) is Resize:
            if op.scales[:2] != (1, 1) or op.coordinates == "tf_crop_and_resize":
                return False
        elif type(op) in (ReduceMean, ReduceMax):
            if not op.keepdims or {axis % 4 for axis in op.axes} - {2, 3}:
                return False
        elif type(op) not in (MaxPool2d, AveragePool2d, *FUNCTIONS):
            return False
        if (
            len(node.outputs) != 1
            or self.graph.values[x].shape[:2] != self.graph.values[y].shape[:2]
        ):
            return False
        self._values.join(x, y)
        return True

    def _joins_convolution(self, node: Node) -> bool:
        x, y = node.inputs[0], node.outputs[0]
        weight, bias = constant(self.graph, node, 1), constant(self.graph, node, 2)
        if weight is None or (bias is None) != absent(node, 2):
            return False
        same = [] if absent(node, 3) else [node.inputs[3]]
        if node.op.groups > 1:
            if weight.shape[:2] != (node.op.groups, 1):
                return False
            same.append(x)
        function = node.op.activation
        if not self.graph.constants.keys().isdisjoint(same):
            return False
        if function is not None and type(function) not in FUNCTIONS:
            return False
        self._values.join(y, *same)
        return True

    def _joins_terms(self, node: Node) -> bool:
        y = node.outputs[0]
        channels = self._channels(y)
        for name in node.inputs:
            shape = self.graph.values[name].shape
            if name in self.graph.constants:
                array = self.graph.constants[name]
                if array.dtype.kind != "f" or not np.isfinite(array).all():
                    return False
            elif len(shape) == 4 and shape[CHANNELS] == channels:
                self._values.join(name, y)
            else:
                return False
        return True

    def _joins_parts(self, node: Node) -> bool:
        op, x, y = node.op, node.inputs[0], node.outputs[0]
        if type(op) is Slice:
            taken = _taken(self.graph, node)
            if taken is None or taken.step != 1 or not taken:
                return False
            self._parts.append((x, taken.start, y))
            return True
        whole, parts = (y, node.inputs) if type(op) is Concat else (x, node.outputs)
        if op.axis % 4 != CHANNELS or not self.graph.constants.keys().isdisjoint(parts):
            return False
        start = 0
        for part in parts:
            self._parts.append((whole, start, part))
            start += self._channels(part)
        return True

    def _sums_with_zeros(self) -> set[str]:
        """Returns the sums that add nothing to an image's other channels."""
        zero = self._zeros()
        return {
            name
            for name, one in self._sums.items()
            if min(one.both.inputs, key=self._channels) in zero
        }

    def _zeros(self) -> set[str]:
        """Returns the values whose added channels are zero."""
        constants = self.graph.constants
        found: set[str] = set()
        for node in self.graph.nodes:
            op = node.op
            terms = self._sums[node.name].both.inputs if node.name in self._sums else node.inputs
            known = [name in found for name in terms if name and name not in constants]
            if type(op) is Conv2d:
                is_zero = (absent(node, 3) or node.inputs[3] in found) and (
                    op.activation is None or _at_zero(op.activation) == 0
                )
            elif isinstance(op, unary.Unary):
                is_zero = all(known) and _at_zero(op) == 0
            elif type(op) is Mul:
                is_zero = any(known)
            elif type(op) in (Add, Sub):
                # Constants of one number are added to what is added, too.
                wide = (constants[name] for name in terms if name in constants)
                is_zero = all(known) and all(_has_channels(array) for array in wide)
            else:
                is_zero = all(known)
            if is_zero:
                found.update(node.outputs)
        return found

    # ---- where their channels are then ----

    def _layouts(self) -> dict[str, _Layout]:
        """Returns the layouts of the values of which any changes."""
        nodes, root = self.graph.nodes, self._values.root
        classes: dict[str, _Class] = defaultdict(_Class)
        for node in nodes:
            for name in (*node.inputs, *node.outputs):
                if name and name not in self.graph.constants:
                    classes[root(name)].names.add(name)
        convolved = {
            name
            for node in nodes
            if type(node.op) is Conv2d
            for name in (node.inputs[0], node.outputs[0])
        }
        self._cut(classes)
        linked = _Forest()
        for whole, _, part in self._parts:
            linked.join(root(whole), root(part))
        together: dict[str, list[_Class]] = defaultdict(list)
        for name, one in classes.items():
            together[linked.root(name)].append(one)
        found: dict[str, _Layout] = {}
        for those in together.values():
            names = set().union(*(one.names for one in those))
            # Sums within gates, of one place: kernels take any number of them.
            if all(self.graph.values[name].shape[CHANNELS + 1 :] == (1, 1) for name in names):
                continue
            if self._kept.isdisjoint(names) and not convolved.isdisjoint(names):
                found |= self._layouts_of(those)
        return found

    def _cut(self, classes: dict[str, _Class]) -> None:
        """Cuts classes where parts of them end or are cut, and parts where that is cut which they are of."""
        parts = [
            (
                classes[self._values.root(whole)].cuts,
                at,
                classes[self._values.root(part)].cuts,
                part,
            )
            for whole, at, part in self._parts
        ]
        before, after = -1, 0
        while before != after:
            before = after
            for whole, at, own, part in parts:
                count = self._channels(part)
                # Of sums of some channels, a class may have values of more than the part.
                whole |= {at, at + count} | {at + cut for cut in own if cut <= count}
                own |= {cut - at for cut in whole if at <= cut <= at + count}
            after = sum(len(one.cuts) for one in classes.values())

    def _layouts_of(self, classes: list[_Class]) -> dict[str, _Layout]:
        """Returns the layouts of values that change together; none where that is not worth it."""
        found, now, then, is_whole = {}, 0, 0, True
        for one in classes:
            shapes = [self.graph.values[name].shape for name in one.names]
            counts = {shape[CHANNELS] for shape in shapes}
            most = max(counts)
            if len(counts) > 1 and (one.cuts or len(classes) > 1):
                return {}  # where a sum's other channels would be is not told
            ends = sorted(one.cuts | {0, most})
            sizes = np.diff(ends)
            widths = -(-sizes // RUN) * RUN
            starts = np.cumsum(widths) - widths
            positions = np.arange(most) + np.repeat(starts - ends[:-1], sizes)
            layout = _Layout(positions, int(widths.sum()))
            found |= dict.fromkeys(one.names, layout)
            is_whole = is_whole and all(
                count % self.run == 0 for count in (*sizes.tolist(), *counts)
            )
            now += sum(math.prod(shape[CHANNELS:]) for shape in shapes)
            then += sum(layout.width * math.prod(shape[CHANNELS + 1 :]) for shape in shapes)
        return {} if is_whole or then > MOST * now else found

    def _widen(self, node: Node, layouts: dict[str, _Layout], rewrites: Rewrites) -> None:
        op, y, constants = node.op, layouts.get(node.outputs[0]), self.graph.constants
        if node.name in self._sums:
            if y is not None:  # else its class stays, and it is no sum of both
                one = self._sums[node.name]
                rewrites.replace([*one.parts, node], [one.both], "it is part of one sum")
        elif type(op) is Conv2d:
            x = layouts.get(node.inputs[0])
            if x is not None or y is not None:
                self._widen_convolution(node, x, y, rewrites)
        elif y is None:
            return
        elif type(op) is Resize:
            sizes = (op.sizes[0], y.width, *op.sizes[2:])
            rewrites.replace([node], [replace(node, op=replace(op, sizes=sizes))], "")
        elif type(op) is Split:
            widths = tuple(layouts[name].width for name in node.outputs)
            rewrites.replace([node], [replace(node, op=replace(op, sizes=widths))], "")
        elif type(op) is Slice:
            start = int(layouts[node.inputs[0]].positions[_taken(self.graph, node).start])
            cut = Slice((start,), (start + y.width,), (CHANNELS,), (1,))
            rewrites.replace([node], [replace(node, op=cut)], "")
        elif type(op) is BatchNorm:
            numbers = {
                place: y.spread(
                    constants[node.inputs[place]], 0, float(place == 4)
                )  # a variance of 1
                for place in range(1, 5)
            }
            _replace(node, op, numbers, rewrites)
        elif type(op) in (Add, Sub, Mul):
            wide = {
                place: y.spread(constants[name], -3)
                for place, name in enumerate(node.inputs)
                if name in constants and _has_channels(constants[name])
            }
            if wide:
                _replace(node, op, wide, rewrites)

    def _widen_convolution(
        self, node: Node, x: _Layout | None, y: _Layout | None, rewrites: Rewrites
    ) -> None:
        op, weight, bias = node.op, constant(self.graph, node, 1), constant(self.graph, node, 2)
        if op.groups > 1:
            op = replace(op, groups=y.width)
        elif x is not None:
            weight = x.spread(weight, 1)
        constants = {1: weight if y is None else y.spread(weight, 0)}
        if y is not None and bias is not None:
            constants[2] = y.spread(bias, 0)
        _replace(node, op, constants, rewrites)


def _replace(node: Node, op: object, constants: dict[int, np.ndarray], rewrites: Rewrites) -> None:
    """Puts ``node`` with other constants, by the positions of its inputs, in its own place."""
    inputs, arrays = list(node.inputs), {}
    for place, array in constants.items():
        inputs[place] = rewrites.fresh(f"{node.name}.{inputs[place]}.aligned")
        arrays[inputs[place]] = array
    rewrites.replace([node], [replace(node, op=op, inputs=tuple(inputs))], "", arrays)


def _at_zero(op: unary.Unary) -> float:
    return float(op.reference(np.zeros(1, np.float32))[0])


def _has_channels(array: np.ndarray) -> bool:
    """Whether a term of images has numbers of their channels."""
    return array.ndim >= 3 and array.shape[-3] > 1
