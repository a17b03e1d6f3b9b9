"""Errors about models: operators that are not supported, and limits that a file must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UnsupportedError

#: What nodes may claim that say nothing but "so many of this number": one of them, and all.
FILL_BYTES = 2**29
ALL_FILL_BYTES = 2**30


@dataclass(frozen=True)
class UnsupportedNode:
    """A node that the engine cannot run.

    Attributes:
        name, operator: the node's, as the file has them.
        attribute: the attribute or input at fault, or None where the operator is.
        reason: why.
        inputs: the graph's inputs on which it depends and that would have to be known (``constants=``).
    """

    name: str
    operator: str
    attribute: str | None
    reason: str
    inputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        attribute = f", {self.attribute}" if self.attribute else ""
        return f"{self.operator} {self.name!r}{attribute}: {self.reason}"


class UnsupportedNodesError(UnsupportedError):
    """A model holds nodes that the engine cannot run; :attr:`nodes` are all of them."""

    SHOWN = 8

    def __init__(self, source: str, nodes: Sequence[UnsupportedNode]) -> None:
        self.nodes = tuple(nodes)
        text = "; ".join(str(node) for node in self.nodes[: self.SHOWN])
        more = len(self.nodes) - self.SHOWN
        if more > 0:
            text += f"; and {more} more (cnn-engine inspect lists all)"
        count = f"{len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}"
        super().__init__(
            f"{source}: expected operators that the engine has, found {count} without: {text}"
        )


class Refusal(Exception):
    """Raised by converters for an attribute or input that the engine does not support."""

    def __init__(self, attribute: str | None, reason: str, inputs: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.attribute, self.reason, self.inputs = attribute, reason, tuple(inputs)
