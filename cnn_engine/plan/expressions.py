"""Expressions of open dimensions in the arguments of calls: numbered once, computed together at each size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..graph.compiled import decisions_of, numbers_of
from ..graph.dims import Dim, Sizes, holds_dims
from ..graph.guards import Guard
from ..kernels.native import Deferred


class Expressions:
    """Numbers, decisions and structs that depend on sizes, each known by an index."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self.symbols = symbols
        self._dims: dict[tuple, int] = {}
        self._guards: dict[tuple, int] = {}
        self._deferred: dict[Deferred, int] = {}
        self._calls: list[tuple[Callable[..., Any], FilledArguments]] = []
        self._pending: tuple[list[Dim], list[Guard]] = ([], [])
        self._compiled: list[tuple[Callable[..., Any], Callable[..., Any]]] = []

    def number(self, dim: Dim) -> int:
        """Returns the index of an expression among the numbers."""
        if dim.terms not in self._dims:
            self._dims[dim.terms] = len(self._dims)
            self._pending[0].append(dim)
        return self._dims[dim.terms]

    def decision(self, guard: Guard) -> int:
        """Returns the index of a guard among the decisions."""
        key = guard.kind, guard.terms, guard.outcome
        if key not in self._guards:
            self._guards[key] = len(self._guards)
            self._pending[1].append(guard)
        return self._guards[key]

    def struct(self, deferred: Deferred) -> int:
        """Returns the index of a deferred call among the structs."""
        found = self._deferred.get(deferred)
        if found is None:
            filled = FilledArguments.of(deferred.arguments, self)
            found = self._deferred[deferred] = len(self._calls)
            self._calls.append((deferred.function, filled))
        return found

    def at(self, sizes: Sizes) -> Numbers:
        """Returns all of them at these sizes; structs are made when they are asked for."""
        if any(self._pending):
            dims, guards = self._pending
            self._compiled.append(
                (numbers_of(self.symbols, dims), decisions_of(self.symbols, guards))
            )
            self._pending = [], []
        given = [number for _, number in sizes.numbers]
        found = [(numbers(*given), decisions(*given)) for numbers, decisions in self._compiled]
        return Numbers(
            list(chain.from_iterable(numbers for numbers, _ in found)),
            tuple(chain.from_iterable(decisions for _, decisions in found)),
            self._calls,
        )


class Numbers:
    """Expressions at some sizes."""

    def __init__(
        self,
        numbers: list[int],
        decisions: tuple[bool, ...],
        calls: list[tuple[Any, FilledArguments]],
    ) -> None:
        self.numbers, self.decisions = numbers, decisions
        self._calls = calls
        self._structs: dict[int, Any] = {}

    def struct(self, index: int) -> Any:
        """Returns a struct, made when it is first asked for."""
        found = self._structs.get(index)
        if found is None:
            function, filled = self._calls[index]
            found = self._structs[index] = function(*filled.at(self))
        return found

    def of(self, place: int | None, struct: int | None, number: int) -> int:
        """Returns a number: an expression's, a deferred call's, or the one that is given."""
        if place is not None:
            return self.numbers[place]
        return number if struct is None else self.struct(struct)


@dataclass(frozen=True)
class FilledArguments:
    """Arguments of a call, some of which are filled in for each size."""

    arguments: tuple[Any, ...]
    numbers: tuple[tuple[int, int], ...]
    structs: tuple[tuple[int, int], ...]

    @staticmethod
    def of(arguments: Sequence[Any], expressions: Expressions) -> FilledArguments:
        """Returns arguments of which open dimensions and deferred calls are filled in.

        Raises:
            TypeError: an argument holds dimensions in a form that cannot be.
        """
        numbers, structs = [], []
        for place, argument in enumerate(arguments):
            if type(argument) is Dim:
                numbers.append((place, expressions.number(argument)))
            elif type(argument) is Deferred:
                structs.append((place, expressions.struct(argument)))
            elif holds_dims(argument):
                raise TypeError(f"expected numbers among arguments, found {argument!r}")
        return FilledArguments(tuple(arguments), tuple(numbers), tuple(structs))

    def at(self, at: Numbers) -> list[Any]:
        """Returns the arguments at some sizes."""
        found, numbers = list(self.arguments), at.numbers
        for place, index in self.numbers:
            found[place] = numbers[index]
        for place, index in self.structs:
            found[place] = at.struct(index)
        return found
