"""Values that lie in memory in 16 bits, and who is told when float16's range does not hold one.

What kernels compute stays float32; a value that they round as they read it can as well be rounded when it is
written, which halves what is moved.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np

from .. import _cpu
from ..errors import UnsupportedError
from ..graph.graph import Graph
from ..locks import ForkSafeLock
from . import kernels
from .kernels.channels_last_cuda import FLOAT16, HALVES

#: What ``--dtype`` may be for values to lie in memory in it.
DTYPES = HALVES


def store_rounded(graph: Graph, dtype: str, device: str) -> Graph:
    """Returns ``graph`` with values in memory in ``dtype`` where all kernels that make and read them can.

    The caller's inputs and outputs, and constants, stay as they are.
    """
    whole = {value.name for value in graph.inputs} | set(graph.outputs) | set(graph.constants)
    whole |= {name for name, value in graph.values.items() if value.dtype != "float32"}
    alike: dict[str, str] = {}

    def first(name: str) -> str:
        while name in alike:
            name = alike[name]
        return name

    for node in graph.nodes:
        values = {name for name in (*node.inputs, *node.outputs) if name is not None}
        if node.op.kind in kernels.ALIASES:
            places, joined = values, True
        else:
            kernel, _ = kernels.choose(node, graph, device)
            if kernel is None or kernel.rewrite(node, graph):
                whole |= values
                continue
            found, joined = kernel.stores(node, graph), kernel.alike
            places = {name for place, name in enumerate(node.inputs) if place in found and name}
            places |= set(node.outputs) if None in found else set()
            whole |= {name for place, name in enumerate(node.inputs) if place not in found and name}
        whole |= values - places
        if joined and places:
            target = first(next(iter(places)))
            for name in places:
                if (other := first(name)) != target:
                    alike[other] = target
    kept = {first(name) for name in whole}
    stored = {name: dtype for name in graph.producers if first(name) not in kept}
    return replace(graph, stored=stored)


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
    """Is told by the kernels of a plan which node's result was finite and is an infinity in float16."""

    def __init__(self, device: Any) -> None:
        words = _WORDS.setdefault(type(device), Words())
        self._word = words.take(device)
        weakref.finalize(self, words.give_back, self._word)
        self._nodes: list[str] = []

    def of(self, node: str) -> Any:
        """Returns what a kernel that runs ``node`` is given."""
        self._nodes.append(node)
        return _cpu.Overflow(_cpu.address_of(self._word), len(self._nodes))

    def check(self) -> None:
        """Refuses results that do not fit, of passes that are done.

        Raises:
            UnsupportedError: there was one since this was last asked.
        """
        if number := int(self._word[0]):
            self._word[0] = 0
            raise UnsupportedError(
                f"dtype: float16: node {self._nodes[number - 1]}: expected results of at most "
                f"{FLOAT16:.0f}, found larger ones; bfloat16 and tf32 have room for them"
            )
