"""JAX in :mod:`benchmarks.low_batch`: it runs the simplified graph that our engine reads, under jit."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cnn_engine.graph.graph import Graph
from cnn_engine.graph.model import Model

from .low_batch_contestants import Contestant

NAME = "JAX"


class Jax:
    """A network in a data type, compiled for each batch by itself. Images are [N, C, H, W], as in the graph.

    Raises:
        ImportError: JAX is not installed.
    """

    def __init__(self, network: Model, dtype: str) -> None:
        # Else it takes three quarters of the memory, which the others then lack.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        self.jax, self.network = jax, network
        self.kind = {"float16": jax.numpy.float16, "bfloat16": jax.numpy.bfloat16}.get(
            dtype, jax.numpy.float32
        )
        self.precision = "highest" if dtype == "float32" else "default"
        floats = {n: a for n, a in network.base.constants.items() if a.dtype.kind == "f"}
        self._weights = {n: jax.numpy.asarray(a, self.kind) for n, a in floats.items()}
        self._compiled: dict[int, Callable[[Any, Any], Any]] = {}

    def compile(self, images: np.ndarray) -> None:
        """Compiles for a batch, and runs it once.

        Raises:
            KeyError: the graph has an operator that is not written here.
        """
        graph = self.network.graph(len(images))
        missing = {node.op.kind for node in graph.nodes} - OPERATORS.keys()
        if missing:
            raise KeyError(f"not written for JAX: {', '.join(sorted(missing))}")
        run = self.jax.jit(partial(self._forward, graph))
        run(self.jax.numpy.asarray(images, self.kind), self._weights).block_until_ready()
        self._compiled[len(images)] = run

    def _forward(self, graph: Graph, images: Any, weights: Any) -> Any:
        values = {name: array for name, array in graph.constants.items() if name not in weights}
        values |= weights | {graph.inputs[0].name: images, None: None}
        with self.jax.default_matmul_precision(self.precision):
            for node in graph.nodes:
                x = [values[name] for name in node.inputs]
                values[node.outputs[0]] = OPERATORS[node.op.kind](self.jax, node.op, *x)
        return values[graph.outputs[0]].astype(self.jax.numpy.float32)

    def contestant(self, images: np.ndarray) -> Contestant:
        """Returns the network with these images, which were compiled for."""
        run, weights, box = self._compiled[len(images)], self._weights, []
        there = self.jax.numpy.asarray(images, self.kind)

        def queue() -> None:
            box[:] = [run(there, weights)]

        def whole() -> np.ndarray:
            return np.asarray(run(self.jax.numpy.asarray(images, self.kind), weights))

        return Contestant(
            NAME, False, queue, whole, lambda: np.asarray(box[0]),
            wait=lambda: box[0].block_until_ready(),
        )  # fmt: skip


def _ends(padding: tuple[int, ...], extra: tuple[int, ...] = (0, 0)) -> list[tuple[int, int]]:
    """Returns (before, after) of rows and columns."""
    top, left, bottom, right = padding
    return [(top, bottom + extra[0]), (left, right + extra[1])]


def _conv2d(jax: Any, op: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    y = jax.lax.conv_general_dilated(
        x, weight, op.stride, _ends(op.padding), rhs_dilation=op.dilation,
        feature_group_count=op.groups, dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )  # fmt: skip
    return y if bias is None else y + bias[:, None, None]


def _pool(jax: Any, op: Any, x: Any, ends: list[tuple[int, int]], start: Any, by: Any) -> Any:
    return jax.lax.reduce_window(
        x, start, by, (1, 1, *op.kernel), (1, 1, *op.stride), [(0, 0), (0, 0), *ends],
        window_dilation=(1, 1, *op.dilation),
    )  # fmt: skip


def _max_pool2d(jax: Any, op: Any, x: Any) -> Any:
    return _pool(jax, op, x, _ends(op.padding), -np.inf, jax.lax.max)


def _average_pool2d(jax: Any, op: Any, x: Any) -> Any:
    sums = _pool(jax, op, x, _ends(op.padding, op.extra), 0.0, jax.lax.add)
    return sums / op.counts(x.shape[2:]).astype(x.dtype)


def _linear(jax: Any, op: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    y = x.reshape(len(x), -1) @ weight.T
    return y if bias is None else y + bias


def _batch_norm(jax: Any, op: Any, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    rows = (-1, *[1] * (x.ndim - 1 - op.axis))
    factor = scale / jax.numpy.sqrt(variance.astype(jax.numpy.float32) + op.epsilon)
    shift = (bias - mean * factor).astype(x.dtype)
    return x * factor.astype(x.dtype).reshape(rows) + shift.reshape(rows)


def _layer_norm(jax: Any, op: Any, x: Any, scale: Any, bias: Any = None) -> Any:
    axes = tuple(range(op.axis % x.ndim, x.ndim))
    wide = x.astype(jax.numpy.float32)
    wide = wide - wide.mean(axis=axes, keepdims=True)
    y = wide / jax.numpy.sqrt((wide * wide).mean(axis=axes, keepdims=True) + op.epsilon)
    y = y.astype(x.dtype) * scale
    return y if bias is None else y + bias


#: Operator -> what computes it of (jax, its record, its inputs): those of benchmarks.low_batch's networks.
OPERATORS: dict[str, Callable[..., Any]] = {
    "conv2d": _conv2d,
    "linear": _linear,
    "matmul": lambda jax, op, a, b: a @ b,
    "max_pool2d": _max_pool2d,
    "average_pool2d": _average_pool2d,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "reduce_mean": lambda jax, op, x: x.mean(axis=op.axes, keepdims=op.keepdims),
    "concat": lambda jax, op, *x: jax.numpy.concatenate(x, op.axis),
    "reshape": lambda jax, op, x: x.reshape(op.resolved(x.shape)),
    "transpose": lambda jax, op, x: x.transpose(op.perm),
    "add": lambda jax, op, a, b: a + b,
    "mul": lambda jax, op, a, b: a * b,
    "relu": lambda jax, op, x: jax.nn.relu(x),
    "sigmoid": lambda jax, op, x: jax.nn.sigmoid(x),
    "hard_sigmoid": lambda jax, op, x: jax.numpy.clip(op.alpha * x + op.beta, 0, 1),
    "hard_swish": lambda jax, op, x: x * jax.numpy.clip(x / 6 + 0.5, 0, 1),
    "swish": lambda jax, op, x: x * jax.nn.sigmoid(op.alpha * x),
    "gelu": lambda jax, op, x: jax.nn.gelu(x, approximate=op.approximate == "tanh"),
}  # fmt: skip
