"""Expressions of open dimensions, compiled: many of them are computed at once, for each new size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .dims import Dim
from .guards import Guard


class _Source:
    """Lines of Python that compute expressions; what several of them have in common is computed once."""

    def __init__(self, symbols: Sequence[str]) -> None:
        # Symbols come from files: in the source they have names of our own.
        self._names = {symbol: f"s{index}" for index, symbol in enumerate(symbols)}
        self.arguments = "".join(f"{name}, " for name in self._names.values())
        self.lines: list[str] = []
        self._parts: dict[Any, str] = {}

    def text(self, terms: tuple) -> str:
        """Returns the source of a sum of products."""
        return " + ".join(map(self._product, terms)) or "0"

    def _product(self, term: tuple[tuple, int]) -> str:
        factors, coefficient = term
        numbers = [f"{coefficient:d}"] if coefficient != 1 or not factors else []
        return " * ".join([*numbers, *map(self._factor, factors)])

    def _factor(self, factor: Any) -> str:
        if isinstance(factor, str):
            return self._names[factor]
        name = self._parts.get(factor)
        if name is None:
            first, second = self.text(factor.first), self.text(factor.second)
            name = self._parts[factor] = f"p{len(self._parts)}"
            found = f"({first}) // ({second})"
            if factor.kind != "floor":
                found = f"{factor.kind}({first}, {second})"
            self.lines.append(f"{name} = {found}")
        return name

    def function(self, returned: str) -> Callable[..., tuple]:
        body = "".join(f"    {line}\n" for line in [*self.lines, f"return {returned}"])
        names: dict[str, Any] = {}
        exec(compile(f"def found({self.arguments}):\n{body}", "<sizes>", "exec"), names)
        return names["found"]


def numbers_of(symbols: Sequence[str], dims: Iterable[Dim]) -> Callable[..., tuple[int, ...]]:
    """Returns a function from the symbols' numbers, in their order, to those of ``dims``."""
    source = _Source(symbols)
    found = "".join(f"{source.text(dim.terms)}, " for dim in dims)
    return source.function(f"({found})")


def decisions_of(
    symbols: Sequence[str], guards: Iterable[Guard]
) -> Callable[..., tuple[bool, ...]]:
    """Returns a function from the symbols' numbers, in their order, to whether each of ``guards`` holds."""
    source = _Source(symbols)
    signs = {
        ("equal", True): "==",
        ("equal", False): "!=",
        ("negative", True): "<",
        ("negative", False): ">=",
    }
    found = "".join(
        f"{source.text(guard.terms)} {signs[guard.kind, guard.outcome]} 0, " for guard in guards
    )
    return source.function(f"({found})")
