"""Region: several nodes that one kernel runs at once, as one operator.

What a region computes, costs and rounds is what its nodes do: nothing is written down a second time. Which
nodes make a region is said by a pattern (:mod:`cnn_engine.graph.passes.fuse.patterns`); which kernel runs one
is said by the kernel table, under the region's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import InputError
from ..locks import cached_property
from .operator import Operator, Value, output_value, record


@dataclass(frozen=True)
class Part:
    """One node of a region.

    Attributes:
        role: what patterns and kernels call it; unique in its region.
        op: the operator's record.
        inputs: names in the region of what it reads; None is an optional input that is always absent.
        outputs: names in the region of what it makes; the first is the role.
    """

    role: str
    op: Operator
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]


@record
class Region(Operator):
    """Nodes that one kernel runs, with names of their own: equal blocks of a network have equal regions.

    Attributes:
        name: the region's kind: its pattern, its kernels, what reports show.
        nodes: in an order in which they can run.
        inputs: names of what it reads, in the order of the node's inputs; trailing ones may be absent.
        outputs: names of what it makes for others, in the order of the node's outputs.
    """

    name: str
    nodes: tuple[Part, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def kind(self) -> str:
        return self.name

    def __getitem__(self, role: str) -> Any:
        """The record of the part that has a role, or None where the region has no such part."""
        return next((part.op for part in self.nodes if part.role == role), None)

    def activation(self, role: str) -> Any:
        """Returns the function that a part applies to its sums, or None: it has none, or there is no part."""
        return getattr(self[role], "activation", None)

    @property
    def compute_dtype(self) -> str:
        """The type that all parts may multiply in; ``float32`` where they differ, or do not round."""
        found = {getattr(part.op, "compute_dtype", None) for part in self.nodes} - {None}
        return found.pop() if len(found) == 1 else "float32"

    def with_compute_dtype(self, dtype: str) -> Region:
        """Returns the region with parts that may multiply in ``dtype``."""
        return self._mapped(
            lambda op: replace(op, compute_dtype=dtype) if _has(op, "compute_dtype") else op
        )

    @cached_property
    def without_activation(self) -> Region:
        return self._mapped(lambda op: op.without_activation)

    def _mapped(self, function: Callable[[Operator], Operator]) -> Region:
        return replace(
            self, nodes=tuple(replace(part, op=function(part.op)) for part in self.nodes)
        )

    def bound(self, names: Sequence[str | None]) -> list[tuple[Operator, tuple[str | None, ...]]]:
        """Returns each part's record with the outer names of its inputs; None: absent, or made inside."""
        given = self._given(names)
        return [(part.op, tuple(map(given.get, part.inputs))) for part in self.nodes]

    def _given(self, inputs: Sequence[Any]) -> dict[str | None, Any]:
        if len(inputs) > len(self.inputs):
            raise InputError(f"expected at most {len(self.inputs)} inputs, found {len(inputs)}")
        missing = [None] * (len(self.inputs) - len(inputs))
        return {None: None, **dict(zip(self.inputs, (*inputs, *missing), strict=True))}

    def values(self, inputs: Sequence[Value | None]) -> dict[str | None, Value | None]:
        """Returns every tensor of the region by name: inputs, and outputs of the parts.

        Raises:
            InputError: the inputs do not fit a part; names its role.
        """
        values = self._given(inputs)
        for part in self.nodes:
            try:
                made = part.op.infer([values[name] for name in part.inputs])
            except InputError as error:
                raise type(error)(f"{part.role}: {error}") from None
            for name, inferred in zip(part.outputs, made, strict=True):
                values[name] = output_value(name, inferred)
        return values

    def infer(self, inputs):
        values = self.values(inputs)
        return tuple(values[name].inferred for name in self.outputs)

    def reference(self, *arrays):
        found = self._given(arrays)
        for part in self.nodes:
            made = part.op.reference(*(found[name] for name in part.inputs))
            made = made if isinstance(made, tuple) else (made,)
            found.update(zip(part.outputs, made, strict=True))
        made = tuple(found[name] for name in self.outputs)
        return made if len(made) > 1 else made[0]

    def flops(self, inputs, outputs) -> int:
        values = self.values(inputs)
        return sum(
            part.op.flops(
                [values[name] for name in part.inputs], [values[name] for name in part.outputs]
            )
            for part in self.nodes
        )

    def terms(self, inputs) -> int:
        values = self.values(inputs)
        return max(part.op.terms([values[name] for name in part.inputs]) for part in self.nodes)


def records_of(op: Operator) -> tuple[Operator, ...]:
    """Returns the records of a region's parts, or ``op`` itself where it is none."""
    return tuple(part.op for part in op.nodes) if isinstance(op, Region) else (op,)


def _has(op: Operator, name: str) -> bool:
    return any(field.name == name for field in fields(op))
