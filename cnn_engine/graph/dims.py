"""Dimensions that are not known yet: expressions of named symbols, such as ``2 * batch``.

A graph with symbols in its shapes stands for every size for which the same decisions would be made. What
decides by a dimension compares it, and the comparison is recorded as a :class:`.guards.Guard`; what needs its
very number pins it. So the graph is right for a size wherever all of its guards hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from .guards import Guard, decide, example_of, is_recorded
from .terms import (
    Compound,
    Evaluator,
    Terms,
    least_of,
    lowest,
    product_of,
    quotient_of,
    sum_of,
    symbols_of,
    terms_of,
    text_of,
)


@dataclass(frozen=True)
class Sizes:
    """The numbers of a graph's symbols.

    Attributes:
        numbers: (symbol, number), by symbol.
        batch: the symbol of the batch, or None where there is none.
        symbolic: whether a graph with the symbols themselves is meant, in which everything is decided as for
            these numbers.
    """

    numbers: tuple[tuple[str, int], ...] = ()
    batch: str | None = None
    symbolic: bool = False

    @staticmethod
    def of(numbers: Mapping[str, int], batch: str | None = None) -> Sizes:
        """Returns the sizes of a mapping from symbols to numbers."""
        return Sizes(tuple(sorted(numbers.items())), batch)

    def updated(self, numbers: Mapping[str, int]) -> Sizes:
        """Returns these sizes with other numbers for some symbols."""
        return replace(self, numbers=tuple(sorted({**dict(self.numbers), **numbers}.items())))

    def with_batch(self, batch: int) -> Sizes:
        """Returns these sizes for another batch, where there is one."""
        return self if self.batch is None else self.updated({self.batch: batch})

    @property
    def images(self) -> int | None:
        """The number of the batch, or None where there is none."""
        return None if self.batch is None else dict(self.numbers)[self.batch]

    @property
    def is_empty(self) -> bool:
        """Whether a dimension is 0."""
        return any(number == 0 for _, number in self.numbers)

    @property
    def is_below_lowest(self) -> bool:
        """Whether a number is less than graphs with symbols are made for."""
        return any(
            number < 1 and (least := lowest(symbol)) is not None and number < least
            for symbol, number in self.numbers
        )

    def as_symbols(self) -> Sizes:
        """Returns sizes that ask for the graph with symbols, with the decisions of these numbers."""
        return replace(self, symbolic=True)

    def resolve(self, shape: Iterable[Dim | int]) -> tuple[Dim | int, ...]:
        """Returns a shape in numbers; where these sizes are symbolic, only symbols that are 0 become so."""
        numbers = dict(self.numbers)
        if self.symbolic:
            return tuple(
                0 if isinstance(d, Dim) and numbers.get(d.own_symbol) == 0 else d for d in shape
            )
        return tuple(dim.at(numbers) if isinstance(dim, Dim) else dim for dim in shape)

    def zero_guards(self) -> tuple[Guard, ...]:
        """Returns guards of which inputs' dimensions are 0: graphs with symbols are made for 1 or more."""
        return tuple(
            Guard("equal", Dim.symbol(symbol).terms, number == 0)
            for symbol, number in self.numbers
            if lowest(symbol) == 1
        )

    def __str__(self) -> str:
        return ", ".join(f"{symbol} {number}" for symbol, number in self.numbers)


class Dim:
    """A dimension as an expression of symbols, each a whole number from 1 on.

    Sums, products, floor divisions and remainders are expressions again, or integers where symbols cancel.
    Comparisons answer as for the numbers of :func:`.guards.recorded`, which records them unless all numbers
    have the same answer.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Terms) -> None:
        self.terms = terms

    @staticmethod
    def symbol(name: str) -> Dim:
        """Returns the dimension called ``name``."""
        return Dim((((name,), 1),))

    def at(self, numbers: Mapping[str, int]) -> int:
        """Returns the number that the expression is where its symbols are these."""
        return Evaluator(numbers).value(self.terms)

    @property
    def symbols(self) -> frozenset[str]:
        """The names of all symbols in the expression."""
        return symbols_of(self.terms)

    @property
    def own_symbol(self) -> str | None:
        """The symbol that the expression is, or None where it computes with some."""
        factors, coefficient = self.terms[0] if len(self.terms) == 1 else ((), 0)
        return factors[0] if coefficient == 1 and [*map(type, factors)] == [str] else None

    def __reduce__(self) -> tuple:
        return Dim, (self.terms,)

    # ---- arithmetic ----

    def __add__(self, other: Any) -> Dim | int:
        terms = _terms_of(other)
        return NotImplemented if terms is None else dim_of(sum_of(self.terms, terms))

    __radd__ = __add__

    def __neg__(self) -> Dim | int:
        return dim_of(product_of(self.terms, terms_of(-1)))

    def __pos__(self) -> Dim:
        return self

    def __sub__(self, other: Any) -> Dim | int:
        return NotImplemented if _terms_of(other) is None else self + -other

    def __rsub__(self, other: Any) -> Dim | int:
        return NotImplemented if _terms_of(other) is None else -self + other

    def __mul__(self, other: Any) -> Dim | int:
        terms = _terms_of(other)
        return NotImplemented if terms is None else dim_of(product_of(self.terms, terms))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Dim | int:
        terms = _terms_of(other)
        return NotImplemented if terms is None else dim_of(quotient_of(self.terms, terms))

    def __rfloordiv__(self, other: Any) -> Dim | int:
        terms = _terms_of(other)
        return NotImplemented if terms is None else dim_of(quotient_of(terms, self.terms))

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
        return decide("equal", sum_of(self.terms, product_of(terms, terms_of(-1))))

    def __lt__(self, other: Any) -> bool:
        terms = _terms_of(other)
        if terms is None:
            return NotImplemented
        return decide("negative", sum_of(self.terms, product_of(terms, terms_of(-1))))

    def __gt__(self, other: Any) -> bool:
        terms = _terms_of(other)
        if terms is None:
            return NotImplemented
        return decide("negative", sum_of(terms, product_of(self.terms, terms_of(-1))))

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
        number = example_of(self.terms)
        decide("equal", sum_of(self.terms, terms_of(-number)))
        return number

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def __hash__(self) -> int:
        if not is_recorded():
            return hash(self.terms)
        return hash(self.__index__())  # sets and dictionaries compare by it first

    def __repr__(self) -> str:
        return text_of(self.terms)


def _terms_of(value: Any) -> Terms | None:
    if isinstance(value, Dim):
        return value.terms
    return terms_of(int(value)) if isinstance(value, (int, np.integer)) else None


def dim_of(terms: Terms) -> Dim | int:
    """Returns the dimension that terms are: an integer where they have no symbol."""
    if not terms:
        return 0
    return terms[0][1] if len(terms) == 1 and not terms[0][0] else Dim(terms)


@dataclass(frozen=True)
class Ratio:
    """One dimension over another, in the place of the ``fractions.Fraction`` that it becomes."""

    above: Dim | int
    below: Dim | int


def ratio(above: Dim | int, below: Dim | int) -> Fraction | Ratio:
    """Returns one dimension over another: a number where that is known."""
    a, b = _terms_of(above), _terms_of(below)
    if a and b and [factors for factors, _ in a] == [factors for factors, _ in b]:
        found = Fraction(a[0][1], b[0][1])
        if all(Fraction(x, y) == found for (_, x), (_, y) in zip(a, b, strict=True)):
            return found
    return Ratio(above, below)


def least(first: Dim | int, second: Dim | int) -> Dim | int:
    """Returns the smaller of two dimensions, as an expression where it depends on a symbol."""
    return _either("min", first, second)


def most(first: Dim | int, second: Dim | int) -> Dim | int:
    """Returns the larger of two dimensions, as an expression where it depends on a symbol."""
    return _either("max", first, second)


def _either(kind: str, first: Dim | int, second: Dim | int) -> Dim | int:
    a, b = _terms_of(first), _terms_of(second)
    difference = sum_of(a, product_of(b, terms_of(-1)))
    if (low := least_of(difference)) is not None and low >= 0:
        return second if kind == "min" else first
    if (high := least_of(difference, -1)) is not None and high >= 0:
        return first if kind == "min" else second
    return dim_of((((Compound(kind, a, b),), 1),))


def estimated(size: Dim | int) -> int:
    """Returns the number at which decisions are recorded, for choices that are right at any other too.

    Raises:
        TypeError: nothing is recorded, so that there is no number.
    """
    return example_of(size.terms) if isinstance(size, Dim) else size


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
    if isinstance(value, Ratio):
        return Fraction(*substituted((value.above, value.below), number_of))
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
