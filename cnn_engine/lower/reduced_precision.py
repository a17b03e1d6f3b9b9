"""Tensors stored in 16 bits, and reports of values that float16 cannot hold.

What kernels compute stays float32; a value that they round as they read it can as well be rounded when it is
written, which halves what is moved.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .. import _cpu, kernels
from ..errors import UnsupportedError
from ..graph.graph import Graph, Node
from ..kernels.cuda.channels_last import FLOAT16, HALVES
from ..locks import ForkSafeLock
from ..operators.binary import Add, Binary, Div, Mul, Pow, Sub
from ..operators.channels_last import Conv2dNhwc
from ..operators.linear import Linear
from ..operators.lp_normalization import LpNormalization
from ..operators.mathematics import Log, Reciprocal, Sqrt
from ..operators.norm import GroupNorm, InstanceNorm, LayerNorm, RmsNorm
from ..operators.reduce import Reduce, ReduceL2, ReduceLogSum, ReduceSumSquare
from ..operators.region import Region, records_of
from ..operators.unary import Clip, Unary
from ..target import Target

#: What ``--dtype`` may be for values to lie in memory in it.
DTYPES = HALVES

#: The inputs of products that are rounded; others are added, or multiplied with, as float32.
_WEIGHTS = {Conv2dNhwc: (1,), Linear: (1,)}

#: Functions whose result turns with the smallest of numbers.
_STEEP = (
    GroupNorm, InstanceNorm, LayerNorm, Log, LpNormalization, Pow, Reciprocal, ReduceL2,
    ReduceLogSum, RmsNorm, Sqrt,
)  # fmt: skip

#: Magnitudes from which a type has an infinity in a number's place, below which it has fewer than ten bits of
#: it, and up to which it has 0 in its place.
PAST = {"float16": 65520.0, "bfloat16": 3.3961775292304957e38}
SHORT = {"float16": 2.0**-15, "bfloat16": 2.0**-126}
NOTHING = {"float16": 2.0**-25, "bfloat16": 2.0**-134}
_NEVER = dict.fromkeys(PAST, 0.0)


def not_held(graph: Graph, dtype: str) -> dict[str, str]:
    """Returns the nodes with constants past the range of ``dtype``, and a note on each.

    They are to run in float32, with all that they read and write: a sum whose 1e-10 keeps a logarithm or a
    division from 0 means numbers that ``dtype`` does not have. So do the squares that it is added to, and
    roots and reciprocals of it. Of weights the largest count: what others lose, rounding has cost more of; so
    it has where a convolution adds to what it reads beside. A small bias, which is added in float32, counts
    where a function that is steep at 0 reads the sum. Limits that clip nothing are no numbers.
    """
    found: dict[str, str] = {}
    for node in graph.nodes:
        for number, vanishes in _numbers_of(node, graph):
            if number >= PAST[dtype] or 0 < number < vanishes[dtype]:
                found[node.name] = f"in float32: {dtype} does not hold its constant {number:g}"
                if number < 1 and not _has_weights(node):
                    with_it = f"in float32 with {node.name}, whose constant {number:g} {dtype} does not hold"
                    for other in (*_squares_in(node, graph), *_roots_of(node, graph)):
                        found.setdefault(other.name, with_it)
                break
    return found


def _squares_in(node: Node, graph: Graph) -> list[Node]:
    """Returns the squares that a node reads, and the sums of squares by which it does."""
    known: dict[str | None, list[Node]] = {}

    def by(name: str | None) -> list[Node]:
        if name not in known:
            known[name], maker = [], graph.producers.get(name)
            op = None if maker is None else maker.op
            if isinstance(op, Add | Sub | Reduce):
                found = [one for given in maker.inputs for one in by(given)]
                known[name] = [maker, *found] if found else []
            squares = isinstance(op, ReduceL2 | ReduceSumSquare)
            squares |= isinstance(op, Mul) and len(set(maker.inputs)) == 1
            if squares or (isinstance(op, Pow) and maker.inputs[1] in graph.constants):
                known[name] = [maker]
        return known[name]

    return [one for given in node.inputs for one in by(given)]


def _roots_of(node: Node, graph: Graph) -> Iterator[Node]:
    """Yields the roots and reciprocals of what a node makes, and those of these."""
    for user in graph.consumers[node.outputs[0]]:
        divides = isinstance(user.op, Div) and user.inputs[0] in graph.constants
        if divides or isinstance(user.op, Sqrt | Reciprocal):
            yield user
            yield from _roots_of(user, graph)


def _numbers_of(node: Node, graph: Graph) -> Iterator[tuple[float, Mapping[str, float]]]:
    """Yields magnitudes of what a node computes with, each with those below which it is lost."""
    if isinstance(node.op, Region):
        for op, inputs in node.op.bound(node.inputs):
            yield from _numbers_of(replace(node, op=op, inputs=inputs), graph)
        return
    op = node.op
    weights = _WEIGHTS.get(type(op), ())
    for place, name in enumerate(node.inputs):
        if name not in graph.constants or not (weights or isinstance(op, Binary)):
            continue
        array = graph.constants[name]
        if array.dtype.kind != "f":
            continue
        largest = _largest(array)
        if place in weights and len(node.inputs) > 3 and node.inputs[3] is not None:
            yield largest, _NEVER  # rounding what they are added to costs more
        elif not weights or place in weights:
            yield largest, SHORT
        else:
            yield largest, NOTHING if _ends_steeply(node, graph) else _NEVER
        if not weights:
            yield _smallest(array), NOTHING
    for function in (op, getattr(op, "activation", None)):
        if isinstance(function, Unary):
            clips = isinstance(function, Clip)
            for number in map(abs, (function.alpha, function.beta)):
                if math.isfinite(number) and not (clips and number >= PAST["float16"]):
                    yield number, SHORT


def _has_weights(node: Node) -> bool:
    """Whether a node, or one of a region's parts, multiplies by weights that are rounded."""
    return any(type(op) in _WEIGHTS for op in records_of(node.op))


def _ends_steeply(node: Node, graph: Graph) -> bool:
    """Returns whether a function that is steep at 0 reads what a node makes, before weights multiply it."""
    if isinstance(getattr(node.op, "activation", None), _STEEP):
        return True
    seen, names = set(), list(node.outputs)
    while names:
        name = names.pop()
        for user in graph.consumers[name]:
            divides = isinstance(user.op, Div) and name in user.inputs[1:]
            if divides or isinstance(user.op, _STEEP):
                return True
            if not _has_weights(user) and user.name not in seen:
                seen.add(user.name)
                names += user.outputs
    return False


def _largest(array: np.ndarray) -> float:
    """Returns the largest magnitude of the finite numbers of an array, or 0."""
    most = max(float(array.max(initial=0)), -float(array.min(initial=0)))
    return most if math.isfinite(most) else _largest(array[np.isfinite(array)])


def _smallest(array: np.ndarray) -> float:
    """Returns the smallest magnitude of the numbers of an array that are not 0, or 0."""
    sizes = np.abs(array[np.isfinite(array) & (array != 0)])
    return float(sizes.min()) if sizes.size else 0.0


def store_rounded(
    graph: Graph, dtype: str, target: Target, in_float32: Collection[str] = ()
) -> Graph:
    """Returns ``graph`` with values in memory in ``dtype`` where all kernels that make and read them can.

    The caller's inputs and outputs, and constants, stay as they are, and so does what the nodes
    ``in_float32`` read and write.
    """
    whole = {value.name for value in graph.inputs} | set(graph.outputs) | set(graph.constants)
    whole |= {name for name, value in graph.values.items() if value.dtype != "float32"}
    root_of: dict[str, str] = {}

    def first(name: str) -> str:
        while name in root_of:
            name = root_of[name]
        return name

    for node in graph.nodes:
        values = {name for name in (*node.inputs, *node.outputs) if name is not None}
        if node.op.kind in kernels.ALIASES:
            rounded, joined = values, True
        else:
            kernel, _ = kernels.choose(node, graph, target)
            if kernel is None or kernel.rewrite(node, graph) or node.name in in_float32:
                whole |= values
                continue
            found, joined = kernel.stores(node, graph), kernel.same_storage
            rounded = {name for index, name in enumerate(node.inputs) if index in found and name}
            rounded |= set(node.outputs) if None in found else set()
            whole |= {name for index, name in enumerate(node.inputs) if index not in found and name}
        whole |= values - rounded
        if joined and rounded:
            root = first(next(iter(rounded)))
            for name in rounded:
                if (other := first(name)) != root:
                    root_of[other] = root
    kept = {first(name) for name in whole}
    storage_dtype = {name: dtype for name in graph.producers if first(name) not in kept}
    return replace(graph, storage_dtype=storage_dtype)


class Words:
    """Words of page-locked memory, which kernels write to, so that none is ever freed under them."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._idle: list[np.ndarray] = []
        self._blocks: list[np.ndarray] = []

    def take(self, device: Any) -> np.ndarray:
        """Returns a word of 0, an int32 array of one element."""
        with self._lock:
            if not self._idle:
                block = device.empty_pinned((1024,), np.int32)
                self._blocks.append(block)
                self._idle += [block[i : i + 1] for i in range(len(block))]
            word = self._idle.pop()
        word[0] = 0
        return word

    def give_back(self, word: np.ndarray) -> None:
        """Lets another take ``word``."""
        with self._lock:
            self._idle.append(word)


#: By the class of the devices whose kernels reach them.
_WORDS: dict[type, Words] = {}


class Overflows:
    """Collects the nodes of a plan whose results float16 does not have.

    Those are numbers past its range, and what is no number, or infinite, where the node read finite ones.
    """

    def __init__(self, device: Any) -> None:
        words = _WORDS.setdefault(type(device), Words())
        self._word = words.take(device)
        weakref.finalize(self, words.give_back, self._word)
        self._nodes: list[str] = []

    def of(self, node: str) -> Any:
        """Returns the argument that reports overflow of a kernel that runs ``node``."""
        self._nodes.append(node)
        return _cpu.Overflow(_cpu.address_of(self._word), len(self._nodes))

    def check(self, of: str = "this pass") -> None:
        """Refuses results that do not fit, of passes that are done.

        Args:
            of: what the message calls those passes.

        Raises:
            UnsupportedError: there was one since this was last asked.
        """
        if number := int(self._word[0]):
            self._word[0] = 0
            raise UnsupportedError(
                f"dtype: float16: node {self._nodes[number - 1]}: expected results of at most "
                f"{FLOAT16:.0f} in {of}, found larger ones, or none; bfloat16 and tf32 have room for them"
            )
