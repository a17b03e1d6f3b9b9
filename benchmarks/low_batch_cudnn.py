"""cuDNN's graph API in :mod:`benchmarks.low_batch`: it runs the simplified graph that our engine reads.

A convolution with its bias, a residual sum and an activation is one graph of cuDNN's, channels last, and so
is a batch norm with its activation. cuDNN's heuristics rank plans, and the fastest of the first few is taken;
some are compiled, which takes about half a second each.
What is neither, or what cuDNN has no plan for, PyTorch computes.

In int8, convolutions of one group multiply int8 with a scale for each tensor and each filter: the largest
number that these images give is 127. Tensors that they alone read are int8 in memory, others float16.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from cnn_engine.errors import UnsupportedError
from cnn_engine.graph.graph import Graph, Node
from cnn_engine.graph.model import Model

from .low_batch_contestants import Contestant, PyTorch

NAME = "cuDNN graphs"

#: Plans of a graph that are timed, the best by cuDNN's heuristics first: so many, or what takes so long.
PLANS, SECONDS = 8, 1.5
#: Passes of a plan that are timed.
PASSES = 10

Shape = tuple[int, ...]
Values = dict[str | None, Any]


#: Operators that begin a graph of cuDNN's.
HEADS = ("conv2d", "batch_norm")


def channels_last(shape: Shape) -> list[int]:
    """Returns the strides of [N, C, H, W] in memory as [N, H, W, C]."""
    _, c, h, w = shape
    return [c * h * w, 1, c * w, c]


class CudnnGraphs:
    """A network in a data type, planned for each batch.

    Args:
        torch: PyTorch's contestant of the same network and data type.
        network: what our engine has read.

    Raises:
        UnsupportedError: the package ``cudnn`` or cuDNN is not there, or the data type is not written here.
    """

    def __init__(self, torch: PyTorch, network: Model) -> None:
        try:
            self.library = importlib.import_module("cudnn")
            version = self.library.backend_version_string()
            self.handle = self.library.create_handle()
        except (ImportError, RuntimeError, OSError) as error:
            raise UnsupportedError(
                f"{NAME}: expected the package nvidia-cudnn-frontend and cuDNN, not found: {error}"
            ) from None
        types = self.library.data_type
        known = ("float16", "bfloat16", "int8")
        if torch.dtype not in known:
            raise UnsupportedError(f"{NAME}: expected {', '.join(known)}, found {torch.dtype}")
        self.peer, self.network, self.version = torch, network, version
        self.torch = torch.torch
        self.types = {
            self.torch.float16: types.HALF, self.torch.bfloat16: types.BFLOAT16,
            self.torch.float32: types.FLOAT, self.torch.int8: types.INT8,
        }  # fmt: skip
        self._most: dict[str, float] = {}  # of every tensor, in int8
        self._kept: set[str] = set()  # tensors that are int8 in memory
        self._weights: Values = {}
        self._built: dict[tuple, Fused | None] = {}
        self._steps: dict[int, list[Callable[[Values], None]]] = {}
        self._notes: dict[int, str] = {}

    def compile(self, images: np.ndarray) -> None:
        """Plans the convolutions of a batch.

        Raises:
            UnsupportedError: the graph has an operator that is not written here.
        """
        graph = self.network.graph(len(images))
        if missing := {node.op.kind for node in graph.nodes} - OPERATORS.keys():
            raise UnsupportedError(f"{NAME}: {', '.join(sorted(missing))}: not written here")
        self._upload(graph)
        readers = Counter(name for node in graph.nodes for name in node.inputs)
        readers.update(graph.outputs)
        done: set[str] = set()
        steps: list[Callable[[Values], None]] = []
        counts: Counter[str] = Counter()
        with self.peer.as_told():
            values = self._start(graph, self.peer.static(images, "channels_last"))
            if self.peer.dtype == "int8":
                self._calibrate(graph, dict(values), readers)
            for node in graph.nodes:
                if node.name in done:
                    continue
                step, nodes = self._step(graph, node, values, readers)
                counts[f"{node.op.kind} {'graph' if isinstance(step, Fused) else 'torch'}"] += 1
                step(values)
                done |= {one.name for one in nodes}
                steps.append(step)
        self._steps[len(images)] = steps
        own, all_of_them = counts["conv2d graph"], counts["conv2d graph"] + counts["conv2d torch"]
        self._notes[len(images)] = (
            f"cuDNN {self.version}: {own} of {all_of_them} convolutions as graphs"
        )

    def contestant(self, images: np.ndarray) -> Contestant:
        """Returns the network with these images, which were compiled for, in a CUDA graph."""
        graph, steps = self.network.graph(len(images)), self._steps[len(images)]
        chosen: set[int] = set()
        with self.peer.as_told():
            values = self._start(graph, self.peer.static(images, "channels_last"))
            for step in steps:
                if isinstance(step, Fused) and step.shared not in chosen:
                    step.choose(values)
                    chosen.add(step.shared)
                step(values)

        def module(there: Any) -> Any:
            values = self._start(graph, there)
            for step in steps:
                step(values)
            return values[graph.outputs[0]]

        with self.peer.as_told():
            found = self.peer.contestant(NAME, module, images, "channels_last")
        found.note = self._notes[len(images)]
        return found

    def _upload(self, graph: Graph) -> None:
        """Puts the graph's constants on the device, those of convolutions channels last."""
        for name, array in graph.constants.items():
            if name in self._weights:
                continue
            tensor = self.torch.from_numpy(np.array(array)).to(self.peer.model.device)
            if array.dtype.kind == "f":
                tensor = tensor.to(self.peer.kind)
            if tensor.ndim == 4:
                tensor = tensor.contiguous(memory_format=self.torch.channels_last)
            self._weights[name] = tensor

    def _start(self, graph: Graph, images: Any) -> Values:
        if self.peer.model.device == "cuda":
            stream = self.torch.cuda.current_stream().cuda_stream
            self.library.set_stream(handle=self.handle, stream=stream)
        return {**self._weights, graph.inputs[0].name: images, None: None}

    def _step(
        self, graph: Graph, node: Node, values: Values, readers: Mapping[Any, int]
    ) -> tuple[Callable[[Values], None], list[Node]]:
        """Returns what computes a node, and the nodes after it that it computes, too."""
        fixed = all(name is None or name in self._weights for name in node.inputs[1:])
        if node.op.kind in HEADS and fixed:
            nodes = chain(graph, node, values, readers)
            for count in range(len(nodes), 0, -1):
                fused = self._fused(graph, nodes[:count], values)
                if fused is not None:
                    return fused, nodes[:count]
        return Plain(self, node), [node]

    def _calibrate(
        self, graph: Graph, values: dict[str | None, Any], readers: Mapping[Any, int]
    ) -> None:
        """Finds the largest number of every tensor, and which tensors int8 convolutions alone read."""
        for node in graph.nodes:
            Plain(self, node)(values)
            made = node.outputs[0]
            self._most[made] = float(values[made].abs().max()) or 1.0
        there: Values = dict.fromkeys((*self._weights, graph.inputs[0].name))
        groups: list[list[Node]] = []
        done: set[str] = set()
        for node in graph.nodes:
            if node.name not in done:
                nodes = chain(graph, node, there, readers) if node.op.kind in HEADS else [node]
                groups.append(nodes)
                done |= {one.name for one in nodes}
                there[nodes[-1].outputs[0]] = None
        made = {nodes[-1].outputs[0] for nodes in groups if nodes[0].op.kind in HEADS}
        others = {
            name
            for first, *rest in groups
            for name in (first.inputs if not self.is_int8(graph, first) else first.inputs[1:])
        }
        self._kept = made - others - {*graph.outputs}

    def is_int8(self, graph: Graph, node: Node) -> bool:
        """Whether a convolution multiplies int8: one of groups, or of few channels, has float16."""
        if self.peer.dtype != "int8" or node.op.kind != "conv2d" or node.op.groups != 1:
            return False
        return graph.values[node.inputs[0]].shape[1] % 4 == 0

    def scale(self, name: str) -> float:
        """Returns what one of a tensor's int8 numbers is worth."""
        return self._most[name] / 127

    def keeps(self, name: str) -> bool:
        """Whether a tensor is to be int8 in memory."""
        return name in self._kept

    def _fused(self, graph: Graph, nodes: list[Node], values: Values) -> Fused | None:
        """Returns the nodes as one graph of cuDNN's, or None: it has no plan for them."""
        multiplies_int8 = self.is_int8(graph, nodes[0])
        read = [*nodes[0].inputs]
        for before, node in pairwise(nodes):
            read += [other_input(node, before.outputs[0])] if node.op.kind == "add" else []
        tensors = [
            values[name] if name is None else (tuple(values[name].shape), values[name].dtype)
            for name in read
        ]
        out = self.keeps(nodes[-1].outputs[0])
        key = (*tensors, out, multiplies_int8, *(repr(node.op) for node in nodes))
        if key not in self._built:
            try:
                self._built[key] = Fused(self, nodes, values, multiplies_int8)
            except TimeoutError:
                raise
            except (
                Exception
            ):  # cuDNN's errors have no common base, and PyTorch computes what it does not
                self._built[key] = None
        made = self._built[key]
        return made and made.of(nodes, values)


class Plain:
    """A node that PyTorch computes."""

    def __init__(self, owner: CudnnGraphs, node: Node) -> None:
        self._owner, self._node, self._compute = owner, node, OPERATORS[node.op.kind]

    def __call__(self, values: Values) -> None:
        owner, inputs = self._owner, []
        for name in self._node.inputs:
            tensor = values[name]
            if tensor is not None and tensor.dtype == owner.torch.int8:
                tensor = tensor.to(owner.peer.kind) * owner.scale(name)
            inputs.append(tensor)
        values[self._node.outputs[0]] = self._compute(owner.torch, self._node.op, *inputs)


class Fused:
    """A convolution or a batch norm and what follows it, as a graph of cuDNN's with its fastest plan.

    Args:
        nodes: as :func:`chain` returns them.
        values: of all tensors so far.
        multiplies_int8: whether the convolution multiplies int8.

    Raises:
        Exception: cuDNN has no plan.
    """

    def __init__(
        self, owner: CudnnGraphs, nodes: list[Node], values: Values, multiplies_int8: bool
    ) -> None:
        self._owner, self._int8, library = owner, multiplies_int8, owner.library
        types = library.data_type
        self._given: list[Any] = []  # tensors of the graph, as self._inputs gives them
        self._scalars: dict[float, Any] = {}
        self._graph = library.pygraph(
            io_data_type=owner.types[owner.peer.kind], intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT, handle=owner.handle,
        )  # fmt: skip
        self._bind(nodes, values)
        inputs = self._inputs(values)
        following = iter(inputs)
        y = self._head(nodes[0], following)
        for node in nodes[1:]:
            if node.op.kind in ACTIVATIONS:
                y = ACTIVATIONS[node.op.kind](self, node.op, y)
                continue
            other = next(following)
            term = self._tensor(other)
            if other.dtype == owner.torch.int8:
                term = self._graph.mul(term, self._tensor(next(following)))
            y = self._graph.add(y, term)
        self._type = owner.peer.kind
        if owner.keeps(nodes[-1].outputs[0]):
            self._type = owner.torch.int8
            y = self._graph.mul(y, self._tensor(next(following)))
        self._out = y.set_output(True).set_data_type(owner.types[self._type])
        self._shape = self._output_shape(nodes[0], inputs)
        self._out.set_dim(list(self._shape)).set_stride(channels_last(self._shape))
        graph = self._graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([library.heur_mode.A, library.heur_mode.FALLBACK])
        graph.check_support()
        self._plans = self._plans_built(values)
        self._chosen = [self._plans[0]]  # shared with copies; see choose

    def of(self, nodes: list[Node], values: Values) -> Fused:
        """Returns the same graph for other nodes of the same shapes."""
        other = object.__new__(Fused)
        other.__dict__ = dict(self.__dict__)
        other._bind(nodes, values)
        return other

    def __call__(self, values: Values) -> None:
        values[self._nodes[-1].outputs[0]] = self._run(values, *self._chosen[0])

    def scalar(self, value: float) -> Any:
        """Returns the graph's tensor of one number."""
        if value not in self._scalars:
            torch, device = self._owner.torch, self._owner.peer.model.device
            number = torch.full((1, 1, 1, 1), value, dtype=torch.float32, device=device)
            made = self._graph.tensor(
                dim=[1] * 4, stride=[1] * 4, data_type=self._owner.library.data_type.FLOAT
            )
            self._scalars[value] = made, number
        return self._scalars[value][0]

    @property
    def shared(self) -> int:
        """The same for all copies of a graph."""
        return id(self._chosen)

    @property
    def graph(self) -> Any:
        """cuDNN's graph, while it is made."""
        return self._graph

    def _tensor(self, array: Any) -> Any:
        shape = tuple(array.shape)
        made = self._graph.tensor(
            dim=list(shape), stride=channels_last(shape), data_type=self._owner.types[array.dtype]
        )
        self._given.append(made)
        return made

    def _head(self, node: Node, following: Iterator[Any]) -> Any:
        """Returns the graph's tensor of a convolution with its bias, or of a batch norm."""
        types = self._owner.library.data_type
        x, second = self._tensor(next(following)), self._tensor(next(following))
        if node.op.kind == "batch_norm":
            return self._graph.add(self._graph.mul(x, second), self._tensor(next(following)))
        top, left, bottom, right = node.op.padding
        y = self._graph.conv_fprop(
            x, second, pre_padding=[top, left], post_padding=[bottom, right],
            stride=list(node.op.stride), dilation=list(node.op.dilation),
            compute_data_type=types.INT32 if self._int8 else types.FLOAT,
        )  # fmt: skip
        if self._int8:
            y = self._graph.mul(y.set_data_type(types.INT32), self._tensor(next(following)))
        has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
        return self._graph.add(y, self._tensor(next(following))) if has_bias else y

    def _output_shape(self, node: Node, inputs: list[Any]) -> Shape:
        """Returns [N, C, H, W] of what the graph makes."""
        x = tuple(inputs[0].shape)
        if node.op.kind == "batch_norm":
            return x
        weight, op = tuple(inputs[1].shape), node.op
        sides = zip(x[2:], weight[2:], op.padding[:2], op.padding[2:], strict=True)
        return x[0], weight[0], *(
            (size + before + after - (taps - 1) * dilation - 1) // stride + 1
            for (size, taps, before, after), dilation, stride in zip(
                sides, op.dilation, op.stride, strict=True
            )
        )  # fmt: skip

    def _bind(self, nodes: list[Node], values: Values) -> None:
        """Takes nodes, and prepares what the graph reads of them besides activations."""
        owner, first, torch = self._owner, nodes[0], self._owner.torch
        self._nodes = nodes
        fixed = [values[name] for name in first.inputs[1:] if name is not None]
        if first.op.kind == "batch_norm":
            fixed = [*_scale_and_shift(first.op, *fixed)]
        elif self._int8:
            weight = fixed[0].float()
            steps = weight.abs().amax(dim=(1, 2, 3)).clamp(min=1e-12) / 127
            rounded = (weight / _per_channel(steps).transpose(0, 1)).round().to(torch.int8)
            bias = [one.float() for one in fixed[1:]]
            fixed = [rounded, steps * owner.scale(first.inputs[0]), *bias]
        self._fixed = [self._last(one if one.ndim == 4 else _per_channel(one)) for one in fixed]
        device = owner.peer.model.device

        def number(value: float) -> Any:
            return torch.full((1, 1, 1, 1), value, dtype=torch.float32, device=device)

        self._others: list[tuple[str, list[Any]]] = []
        for before, node in pairwise(nodes):
            if node.op.kind == "add":
                name = other_input(node, before.outputs[0])
                is_int8 = values[name].dtype == torch.int8
                self._others.append((name, [number(owner.scale(name))] if is_int8 else []))
        out = nodes[-1].outputs[0]
        self._ends = [number(1 / owner.scale(out))] if owner.keeps(out) else []

    def _inputs(self, values: Values) -> list[Any]:
        """Returns the tensors that the graph reads, channels last, in the order in which it names them."""
        torch, name = self._owner.torch, self._nodes[0].inputs[0]
        x = values[name]
        if self._int8 and x.dtype != torch.int8:
            scaled = x.float() * (1 / self._owner.scale(name))
            x = scaled.round().clamp(-127, 127).to(torch.int8)
        found = [self._last(x), *self._fixed]
        for other, scales in self._others:
            found += [self._last(values[other]), *scales]
        return [*found, *self._ends]

    def _last(self, array: Any) -> Any:
        return array.contiguous(memory_format=self._owner.torch.channels_last)

    def _run(self, values: Values, plan: int, workspace: int) -> Any:
        torch, owner = self._owner.torch, self._owner
        inputs = self._inputs(values)
        device = inputs[0].device
        out = torch.empty(
            self._shape, dtype=self._type, device=device, memory_format=torch.channels_last
        )
        given = dict(zip(self._given, inputs, strict=True)) | dict(self._scalars.values())
        room = torch.empty(max(workspace, 1), dtype=torch.uint8, device=device)
        self._graph.execute_plan_at_index(
            {**given, self._out: out}, room, plan, handle=owner.handle
        )
        return out

    def _plans_built(self, values: Values) -> list[tuple[int, int]]:
        """Returns the numbers of plans that can be built and run, and the bytes that each needs besides."""
        graph, found, begin = self._graph, list[tuple[int, int]](), perf_counter()
        fault: Exception = UnsupportedError(f"{NAME}: expected a plan, found none")
        for plan in range(min(graph.get_execution_plan_count(), PLANS)):
            if found and perf_counter() - begin > SECONDS:
                break
            try:
                graph.build_plan_at_index(plan)
                made = plan, graph.get_workspace_size_plan_at_index(plan)
                self._run(values, *made)
                found.append(made)
            except TimeoutError:
                raise
            except Exception as error:  # another plan may do
                fault = error
        if not found:
            raise fault
        return found

    def choose(self, values: Values) -> None:
        """Takes the fastest of the plans, for all copies; nothing else is to run on the device."""
        times: dict[tuple[int, int], float] = {}
        fault: Exception | None = None
        for plan in [*self._plans]:
            try:
                times[plan] = self._time(values, *plan)
            except Exception as error:  # a plan that cannot run takes no part
                self._plans.remove(plan)
                fault = error
        if not times:
            raise fault or UnsupportedError(f"{NAME}: expected a plan that runs, found none")
        self._chosen[0] = min(times, key=times.__getitem__)

    def _time(self, values: Values, plan: int, workspace: int) -> float:
        """Returns ms of a run by the device's events; on the CPU, which has none, the plan's number."""
        self._run(values, plan, workspace)
        if self._owner.peer.model.device != "cuda":
            return plan
        event = self._owner.torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        for _ in range(PASSES):
            self._run(values, plan, workspace)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def chain(graph: Graph, first: Node, values: Values, readers: Mapping[Any, int]) -> list[Node]:
    """Returns a node and those that follow it alone: a sum with what is there already, and an activation."""
    nodes = [first]
    while readers[nodes[-1].outputs[0]] == 1 and nodes[-1].outputs[0] not in graph.outputs:
        made = nodes[-1].outputs[0]
        (after,) = (node for node in graph.nodes if made in node.inputs)
        if after.op.kind in ACTIVATIONS:
            return [*nodes, after]
        if len(nodes) > 1 or after.op.kind != "add" or first.op.kind != "conv2d":
            break
        other = other_input(after, made)
        if other not in values or graph.values[other].shape != graph.values[made].shape:
            break
        nodes.append(after)
    return nodes


def other_input(node: Node, name: str) -> str | None:
    """Returns what a sum reads besides ``name``."""
    first, second = node.inputs
    return second if first == name else first


def _per_channel(array: Any) -> Any:
    """Returns [C] as [1, C, 1, 1]."""
    return array.reshape(1, -1, 1, 1)


def _scale_and_shift(op: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> tuple[Any, Any]:
    factor = scale.float() / (variance.float() + op.epsilon).sqrt()
    return factor.to(scale.dtype), (bias.float() - mean.float() * factor).to(scale.dtype)


def _hard_sigmoid(made: Fused, y: Any, alpha: float, beta: float) -> Any:
    graph = made.graph
    line = graph.add(graph.mul(y, made.scalar(alpha)), made.scalar(beta))
    return graph.relu(line, lower_clip=0.0, upper_clip=1.0)


#: Activation -> what adds it to a graph of cuDNN's, of (graph, the operator's record, tensor).
ACTIVATIONS: dict[str, Callable[[Fused, Any, Any], Any]] = {
    "relu": lambda made, op, y: made.graph.relu(y),
    "sigmoid": lambda made, op, y: made.graph.sigmoid(y),
    "swish": lambda made, op, y: made.graph.swish(y, swish_beta=op.alpha),
    "hard_sigmoid": lambda made, op, y: _hard_sigmoid(made, y, op.alpha, op.beta),
    "hard_swish": lambda made, op, y: made.graph.mul(y, _hard_sigmoid(made, y, 1 / 6, 0.5)),
}


def _padded(torch: Any, x: Any, padding: tuple[int, ...], value: float = 0.0) -> Any:
    top, left, bottom, right = padding
    return (
        torch.nn.functional.pad(x, (left, right, top, bottom), value=value) if any(padding) else x
    )


def _conv2d(torch: Any, op: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    top, left, bottom, right = op.padding
    ends = (top, left)
    if ends != (bottom, right):
        x, ends = _padded(torch, x, op.padding), (0, 0)
    return torch.nn.functional.conv2d(x, weight, bias, op.stride, ends, op.dilation, op.groups)


def _max_pool2d(torch: Any, op: Any, x: Any) -> Any:
    x = _padded(torch, x, op.padding, -float("inf"))
    return torch.nn.functional.max_pool2d(x, op.kernel, op.stride, 0, op.dilation)


def _average_pool2d(torch: Any, op: Any, x: Any) -> Any:
    counts, sizes = op.counts(tuple(x.shape[2:])), tuple(x.shape[2:])
    top, left, bottom, right = op.padding
    x = _padded(torch, x, (top, left, bottom + op.extra[0], right + op.extra[1]))
    if op.dilation != (1, 1) or (counts != counts.flat[0]).any():
        raise UnsupportedError(f"{NAME}: expected one divisor for images of {sizes}, found several")
    return torch.nn.functional.avg_pool2d(
        x, op.kernel, op.stride, divisor_override=int(counts.flat[0])
    )


def _linear(torch: Any, op: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    return torch.nn.functional.linear(x.reshape(len(x), -1), weight, bias)


def _batch_norm(torch: Any, op: Any, x: Any, *statistics: Any) -> Any:
    scale, shift = _scale_and_shift(op, *statistics)
    rows = (-1, *[1] * (x.ndim - 1 - op.axis))
    return x * scale.reshape(rows) + shift.reshape(rows)


def _layer_norm(torch: Any, op: Any, x: Any, scale: Any, bias: Any = None) -> Any:
    return torch.nn.functional.layer_norm(x, x.shape[op.axis % x.ndim :], scale, bias, op.epsilon)


#: Operator -> what computes it of (torch, its record, its inputs): those of benchmarks.low_batch's networks.
OPERATORS: dict[str, Callable[..., Any]] = {
    "conv2d": _conv2d,
    "linear": _linear,
    "matmul": lambda torch, op, a, b: a @ b,
    "max_pool2d": _max_pool2d,
    "average_pool2d": _average_pool2d,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "reduce_mean": lambda torch, op, x: x.mean(dim=op.axes, keepdim=op.keepdims),
    "concat": lambda torch, op, *x: torch.cat(x, op.axis),
    "reshape": lambda torch, op, x: x.reshape(op.resolved(tuple(x.shape))),
    "transpose": lambda torch, op, x: x.permute(op.perm),
    "add": lambda torch, op, a, b: a + b,
    "mul": lambda torch, op, a, b: a * b,
    "relu": lambda torch, op, x: x.relu(),
    "sigmoid": lambda torch, op, x: x.sigmoid(),
    "hard_sigmoid": lambda torch, op, x: (x * op.alpha + op.beta).clamp(0, 1),
    "hard_swish": lambda torch, op, x: torch.nn.functional.hardswish(x),
    "swish": lambda torch, op, x: (
        torch.nn.functional.silu(x) if op.alpha == 1 else x * (op.alpha * x).sigmoid()
    ),
    "gelu": lambda torch, op, x: torch.nn.functional.gelu(x, approximate=op.approximate),
}  # fmt: skip
