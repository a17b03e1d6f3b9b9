"""Dimensions that are not known yet: expressions of named symbols, such as ``2 * batch``.

A graph that is made with :data:`BATCH` in its shapes stands for every batch for which the same decisions
would be made. What decides by a dimension compares it, and the comparison is recorded as a :class:`Guard`;
what needs its very number pins it. So the graph is right for a batch wherever all of its guards hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

#: What expressions are compared by while a graph is made, in place of a number that is not known: a batch
#: like many others, and no number of channels.
EXAMPLES = {"batch": 13}


@dataclass(frozen=True)
class _Part:
    """What is no polynomial: ``floor``, ``min`` or ``max`` of two expressions."""

    kind: str
    first: tuple
    second: tuple


#: The sum of products that an expression is: ((factors), coefficient), sorted. Factors are symbols or parts.
_Terms = tuple[tuple[tuple[Any, ...], int], ...]


def _value(terms: _Terms, numbers: Mapping[str, int]) -> int:
    total = 0
    for factors, coefficient in terms:
        for factor in factors:
            coefficient *= numbers[factor] if type(factor) is str else _part_value(factor, numbers)
        total += coefficient
    return total


def _part_value(part: _Part, numbers: Mapping[str, int]) -> int:
    first, second = _value(part.first, numbers), _value(part.second, numbers)
    if part.kind == "floor":
        return first // second
    return min(first, second) if part.kind == "min" else max(first, second)


def _least(terms: _Terms, sign: int = 1) -> int | None:
    """Returns a number that ``sign`` times the expression is never less than, or None where none is known."""
    total = 0
    for factors, coefficient in terms:
        if factors and sign * coefficient < 0:
            return None
        # A symbol is at least 1; of parts nothing is known but in products of numbers from 0 on.
        if any(type(factor) is not str for factor in factors):
            if not all(_is_natural(factor) for factor in factors):
                return None
            continue
        total += sign * coefficient
    return total


def _is_natural(factor: Any) -> bool:
    if type(factor) is str:
        return True
    return all((_least(terms) or -1) >= 0 or terms == () for terms in (factor.first, factor.second))


class Dim:
    """A dimension as an expression of symbols, each a whole number from 1 on.

    Sums, products, floor divisions and remainders are expressions again, or integers where symbols cancel.
    Comparisons answer as for :data:`EXAMPLES` and are recorded, unless all numbers have the same answer.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: _Terms) -> None:
        self.terms = terms

    @staticmethod
    def symbol(name: str) -> Dim:
        """Returns the dimension called ``name``, of :data:`EXAMPLES`."""
        return Dim((((name,), 1),))

    def at(self, numbers: Mapping[str, int]) -> int:
        """Returns the number that the expression is where its symbols are these."""
        return _value(self.terms, numbers)

    def __reduce__(self) -> tuple:
        return Dim, (self.terms,)

    # ---- arithmetic ----

    def __add__(self, other: Any) -> Dim | int:
        terms = _terms_of(other)
        return NotImplemented if terms is None else _dim(_sum(self.terms, terms))

    __radd__ = __add__

    def __neg__(self) -> Dim | int:
        return _dim(_times(self.terms, _terms_of(-1)))

    def __pos__(self) -> Dim:
        return self

    def __sub__(self, other: Any) -> Dim | int:
        return NotImplemented if _terms_of(other) is None else self + -other

    def __rsub__(self, other: Any) -> Dim | int:
        return NotImplemented if _terms_of(other) is None else -self + other

    def __mul__(self, other: Any) -> Dim | int:
        terms = _terms_of(other)
        return NotImplemented if terms is None else _dim(_times(self.terms, terms))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Dim | int:
        terms = _terms_of(other)
        return NotImplemented if terms is None else _dim(_floor(self.terms, terms))

    def __rfloordiv__(self, other: Any) -> Dim | int:
        terms = _terms_of(other)
        return NotImplemented if terms is None else _dim(_floor(terms, self.terms))

    def __mod__(self, other: Any) -> Dim | int:
        return NotImplemented if _terms_of(other) is None else self - other * (self // other)

    def __rmod__(self, other: Any) -> Dim | int:
        return NotImplemented if _terms_of(other) is None else other - self * (other // self)

    def __divmod__(self, other: Any) -> tuple[Dim | int, Dim | int]:
        return self // other, self % other

    # ---- what is decided by it ----

    def __eq__(self, other: object) -> bool:
        terms = _terms_of(other)
        if terms is None:
            return NotImplemented
        return _decide("equal", _sum(self.terms, _times(terms, _terms_of(-1))))

    def __lt__(self, other: Any) -> bool:
        terms = _terms_of(other)
        if terms is None:
            return NotImplemented
        return _decide("negative", _sum(self.terms, _times(terms, _terms_of(-1))))

    def __gt__(self, other: Any) -> bool:
        terms = _terms_of(other)
        if terms is None:
            return NotImplemented
        return _decide("negative", _sum(terms, _times(self.terms, _terms_of(-1))))

    def __le__(self, other: Any) -> bool:
        return NotImplemented if _terms_of(other) is None else not self > other

    def __ge__(self, other: Any) -> bool:
        return NotImplemented if _terms_of(other) is None else not self < other

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        """Pins the dimension: what is made of its number is right for no other.

        Raises:
            TypeError: nothing is recorded, so that there is no number.
        """
        if not _recorders.all:
            raise TypeError(f"expected a number, found the open dimension {self!r}")
        number = self.at(EXAMPLES)
        _decide("equal", _sum(self.terms, _terms_of(-number)))
        return number

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def __hash__(self) -> int:
        if not _recorders.all:
            return hash(self.terms)
        return hash(self.__index__())  # sets and dictionaries compare by it first

    def __repr__(self) -> str:
        return " + ".join(
            " * ".join([*([str(number)] if number != 1 or not factors else []), *map(str, factors)])
            for factors, number in self.terms
        )


def _terms_of(value: Any) -> _Terms | None:
    if isinstance(value, Dim):
        return value.terms
    if isinstance(value, (int, np.integer)):
        return (((), int(value)),) if value else ()
    return None


def _dim(terms: _Terms) -> Dim | int:
    if not terms:
        return 0
    return terms[0][1] if len(terms) == 1 and not terms[0][0] else Dim(terms)


def _gathered(terms: Iterable[tuple[tuple, int]]) -> _Terms:
    found: dict[tuple, int] = {}
    for factors, coefficient in terms:
        found[factors] = found.get(factors, 0) + coefficient
    kept = ((factors, number) for factors, number in found.items() if number)
    return tuple(sorted(kept, key=repr)) if len(found) > 1 else tuple(kept)


def _sum(a: _Terms, b: _Terms) -> _Terms:
    return _gathered((*a, *b))


def _times(a: _Terms, b: _Terms) -> _Terms:
    return _gathered(
        (tuple(sorted((*x, *y), key=repr)) if x and y else x or y, m * n)
        for x, m in a
        for y, n in b
    )


def _floor(a: _Terms, b: _Terms) -> _Terms:
    if not b:
        raise ZeroDivisionError("integer division or modulo by zero")
    if len(b) == 1:
        ((divisor, number),) = b
        whole, rest = [], []
        for factors, coefficient in a:
            left = list(factors)
            for factor in divisor:
                if factor not in left:
                    break
                left.remove(factor)
            else:
                if coefficient // number:
                    whole.append((tuple(left), coefficient // number))
                coefficient %= number
            if coefficient:
                rest.append((factors, coefficient))
        rest = tuple(rest)
        if not rest or (
            not divisor and len(rest) == 1 and not rest[0][0] and 0 <= rest[0][1] < number
        ):
            return _gathered(whole)
        return _sum(_gathered(whole), (((_Part("floor", rest, b),), 1),))
    return (((), 1),) if a == b else (((_Part("floor", a, b),), 1),)


def least(first: Dim | int, second: Dim | int) -> Dim | int:
    """Returns the smaller of two dimensions, as an expression where it depends on a symbol."""
    return _either("min", first, second)


def most(first: Dim | int, second: Dim | int) -> Dim | int:
    """Returns the larger of two dimensions, as an expression where it depends on a symbol."""
    return _either("max", first, second)


def _either(kind: str, first: Dim | int, second: Dim | int) -> Dim | int:
    a, b = _terms_of(first), _terms_of(second)
    difference = _sum(a, _times(b, _terms_of(-1)))
    if (_least(difference) or -1) >= 0 or not difference:
        return second if kind == "min" else first
    if (_least(difference, -1) or -1) >= 0:
        return first if kind == "min" else second
    return _dim((((_Part(kind, a, b),), 1),))


# ---- guards ----


@dataclass(frozen=True)
class Guard:
    """What was decided by an expression: whether it is ``equal`` to 0, or ``negative``."""

    kind: str
    terms: _Terms
    outcome: bool

    def holds(self, numbers: Mapping[str, int]) -> bool:
        """Whether the same is decided where the symbols are these numbers."""
        number = _value(self.terms, numbers)
        return (number == 0 if self.kind == "equal" else number < 0) == self.outcome


class _Recorders(threading.local):
    def __init__(self) -> None:
        self.all: list[dict[tuple, Guard]] = []


_recorders = _Recorders()


@contextmanager
def recorded() -> Iterator[dict[tuple, Guard]]:
    """Records all that is decided by dimensions inside, in this thread."""
    guards: dict[tuple, Guard] = {}
    _recorders.all.append(guards)
    try:
        yield guards
    finally:
        _recorders.all.pop()


def record(guards: Iterable[Guard]) -> None:
    """Records what was decided before, in what goes on here."""
    for recorder in _recorders.all:
        recorder.update(((guard.kind, guard.terms), guard) for guard in guards)


def _decide(kind: str, terms: _Terms) -> bool:
    """Returns whether an expression is 0, or less; records it where that depends on a symbol.

    Where nothing is recorded, expressions are equal if they are written alike, and have no order.

    Raises:
        TypeError: the order depends on a symbol, and nothing is recorded.
    """
    low, high = _least(terms), _least(terms, -1)  # the expression is in [low, -high]
    if kind == "equal":
        if not terms:
            return True
        if (low is not None and low > 0) or (high is not None and high > 0):
            return False
        if not _recorders.all:
            return False
        outcome = _value(terms, EXAMPLES) == 0
    else:
        if low is not None and low >= 0:
            return False
        if high is not None and high > 0:
            return True
        if not _recorders.all:
            raise TypeError(f"expected a number, found the open dimension {_dim(terms)!r}")
        outcome = _value(terms, EXAMPLES) < 0
    record((Guard(kind, terms, outcome),))
    return outcome


# ---- in records, shapes and rows of integers ----


def holds_dims(value: Any) -> bool:
    """Whether a :class:`Dim` is among the fields and items of a value."""
    if isinstance(value, Dim):
        return True
    if isinstance(value, tuple):
        return any(map(holds_dims, value))
    return is_dataclass(value) and any(holds_dims(getattr(value, f.name)) for f in fields(value))


def substituted(value: Any, number_of: Callable[[Dim], int]) -> Any:
    """Returns a value with a number in the place of every :class:`Dim` among its fields and items."""
    if isinstance(value, Dim):
        return number_of(value)
    if isinstance(value, tuple):
        return tuple(substituted(item, number_of) for item in value)
    if holds_dims(value):
        names = (field.name for field in fields(value))
        return type(value)(**{n: substituted(getattr(value, n), number_of) for n in names})
    return value


def integers(sizes: Iterable[Dim | int]) -> np.ndarray:
    """Returns a row of int64, or of objects where expressions are among them."""
    sizes = tuple(sizes)
    if not any(isinstance(size, Dim) for size in sizes):
        return np.array(sizes, np.int64)
    row = np.empty(len(sizes), object)
    row[:] = sizes
    return row


#: Any number of images: the symbol of a graph's batch.
BATCH = Dim.symbol("batch")
