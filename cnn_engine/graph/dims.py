"""Dimensions that are not known yet: expressions of named symbols, such as ``2 * batch``.

A graph with symbols in its shapes stands for every size for which the same decisions would be made. What
decides by a dimension compares it, and the comparison is recorded as a :class:`Guard`; what needs its very
number pins it. So the graph is right for a size wherever all of its guards hold.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

#: What expressions of a batch are compared by while a graph is made, in place of a number that is not known:
#: a batch like many others, and no number of channels.
TYPICAL_BATCH = 13

#: Characters that part of an expression is printed in; of a longer one, a digest is.
LONGEST_TEXT = 400


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


class _Part:
    """What is no polynomial: ``floor``, ``min`` or ``max`` of two expressions; equal ones are one object."""

    __slots__ = ("__weakref__", "first", "kind", "second", "text")

    _all: WeakValueDictionary[tuple, _Part] = WeakValueDictionary()

    def __new__(cls, kind: str, first: _Terms, second: _Terms) -> _Part:
        key = kind, first, second
        found = cls._all.get(key)
        if found is None:
            found = object.__new__(cls)
            found.kind, found.first, found.second = key
            a, b = _text(first), _text(second)
            if kind == "floor":
                divided, divisor = (f"({text})" if " " in text else text for text in (a, b))
                text = f"({divided} // {divisor})"
            else:
                text = f"{kind}({a}, {b})"
            if len(text) > LONGEST_TEXT:
                text = f"{kind}<{hashlib.blake2s(text.encode(), digest_size=6).hexdigest()}>"
            found.text = text
            found = cls._all.setdefault(key, found)
        return found

    def __reduce__(self) -> tuple:
        return _Part, (self.kind, self.first, self.second)

    def __repr__(self) -> str:
        return self.text


#: The sum of products that an expression is: ((factors), coefficient), sorted. Factors are symbols or parts.
_Terms = tuple[tuple[tuple[Any, ...], int], ...]


def _text(terms: _Terms) -> str:
    if not terms:
        return "0"
    text = ""
    for factors, number in terms:
        sign = "-" if number < 0 else "+"
        parts = [
            *([str(abs(number))] if abs(number) != 1 or not factors else []),
            *map(str, factors),
        ]
        text += f" {sign} {' * '.join(parts)}"
    return text[3:] if text.startswith(" +") else f"-{text[3:]}"


class Evaluator:
    """Computes expressions where symbols are these numbers, each part of them once."""

    def __init__(self, numbers: Mapping[str, int] | Sizes) -> None:
        self._numbers = dict(numbers.numbers if isinstance(numbers, Sizes) else numbers)
        self._known: dict[Any, int] = {}

    def __call__(self, dim: Dim) -> int:
        return self.value(dim.terms)

    def __contains__(self, symbol: str) -> bool:
        return symbol in self._numbers

    def set_default(self, symbol: str, number: int) -> None:
        """Gives a symbol its number where it has none."""
        self._numbers.setdefault(symbol, number)

    def numbers(self) -> dict[str, int]:
        """Returns the numbers of all symbols."""
        return dict(self._numbers)

    def value(self, terms: _Terms) -> int:
        """Returns the number of a sum of products."""
        total = 0
        for factors, coefficient in terms:
            for factor in factors:
                coefficient *= self._numbers[factor] if type(factor) is str else self._part(factor)
            total += coefficient
        return total

    def _part(self, part: _Part) -> int:
        found = self._known.get(part)
        if found is None:
            first, second = self.value(part.first), self.value(part.second)
            if part.kind == "floor":
                found = first // second
            else:
                found = min(first, second) if part.kind == "min" else max(first, second)
            self._known[part] = found
        return found


def lowest(symbol: str) -> int | None:
    """Returns a number that a symbol is never less than; None: it may be any.

    Dimensions of inputs are 1 or more. What is found while a graph runs, :func:`found_dimension` and
    :func:`found_element`, may be 0 or any number.
    """
    if not symbol.endswith("]"):
        return 1
    return 0 if ".shape[" in symbol else None


def found_dimension(tensor: str, axis: int) -> str:
    """Returns the symbol of a dimension that is found while a graph runs: how many, such as of boxes."""
    return f"{tensor}.shape[{axis}]"


def found_element(tensor: str, index: int) -> str:
    """Returns the symbol of an element that is found while a graph runs, and says a size or a branch."""
    return f"{tensor}[{index}]"


def _least(terms: _Terms, sign: int = 1) -> int | None:
    """Returns a number that ``sign`` times the expression is never less than, or None where none is known."""
    total = 0
    for factors, coefficient in terms:
        if factors and sign * coefficient < 0:
            return None
        bound = sign * coefficient
        for factor in factors:
            least = lowest(factor) if type(factor) is str else _least_of(factor)
            if least is None or least < 0:
                return None
            bound *= least
        total += bound
    return total


def _least_of(part: _Part) -> int | None:
    """Returns a number that a part is never less than, or None where none is known."""
    first, second = _least(part.first), _least(part.second)
    if part.kind == "max":
        return max((bound for bound in (first, second) if bound is not None), default=None)
    if first is None or second is None:
        return None
    if part.kind == "min":
        return min(first, second)
    if second < 1 or first < 0:
        return None
    number = _terms_number(part.second)
    return 0 if number is None else first // number


def _terms_number(terms: _Terms) -> int | None:
    """Returns the number that terms are, or None where they have a symbol."""
    if not terms:
        return 0
    return terms[0][1] if len(terms) == 1 and not terms[0][0] else None


class Dim:
    """A dimension as an expression of symbols, each a whole number from 1 on.

    Sums, products, floor divisions and remainders are expressions again, or integers where symbols cancel.
    Comparisons answer as for the numbers of :func:`recorded`, which records them unless all numbers have the
    same answer.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: _Terms) -> None:
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
        number = _recorders.all[-1].at.value(self.terms)
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
        return _text(self.terms)


def symbols_of(terms: _Terms) -> frozenset[str]:
    """Returns the names of all symbols in a sum of products."""
    found: set[str] = set()
    for factors, _ in terms:
        for factor in factors:
            if type(factor) is str:
                found.add(factor)
            else:
                found |= symbols_of(factor.first) | symbols_of(factor.second)
    return frozenset(found)


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
    # Numbers come last, as people write them; the rest by what it prints as.
    return tuple(sorted(kept, key=_order)) if len(found) > 1 else tuple(kept)


def _order(term: tuple[tuple, int]) -> tuple:
    return not term[0], tuple(map(str, term[0]))


def _sum(a: _Terms, b: _Terms) -> _Terms:
    return _gathered((*a, *b))


def _times(a: _Terms, b: _Terms) -> _Terms:
    return _gathered(
        (tuple(sorted((*x, *y), key=str)) if x and y else x or y, m * n) for x, m in a for y, n in b
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
        rest = _gathered(rest)
        if not divisor and number > 0:
            inner, product = _flattened(rest, number)
            if product != number:
                return _sum(_gathered(whole), _floor(inner, (((), product),)))
        return _sum(_gathered(whole), (((_Part("floor", rest, b),), 1),))
    return (((), 1),) if a == b else (((_Part("floor", a, b),), 1),)


def _flattened(terms: _Terms, number: int) -> tuple[_Terms, int]:
    """Returns what (terms // number) is as a division of its inner numerator: (a // m + k) // n is one."""
    inner = [term for term in terms if term[0]]
    if len(inner) != 1 or inner[0][1] != 1 or len(inner[0][0]) != 1:
        return terms, number
    ((part,), _) = inner[0]
    divisor = None if type(part) is str or part.kind != "floor" else _terms_number(part.second)
    if divisor is None or divisor <= 0:
        return terms, number
    offset = sum(coefficient for factors, coefficient in terms if not factors)
    return _sum(part.first, _terms_of(offset * divisor)), divisor * number


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
    difference = _sum(a, _times(b, _terms_of(-1)))
    if (low := _least(difference)) is not None and low >= 0:
        return second if kind == "min" else first
    if (high := _least(difference, -1)) is not None and high >= 0:
        return first if kind == "min" else second
    return _dim((((_Part(kind, a, b),), 1),))


def estimated(size: Dim | int) -> int:
    """Returns the number at which decisions are recorded, for choices that are right at any other too.

    Raises:
        TypeError: nothing is recorded, so that there is no number.
    """
    if not isinstance(size, Dim):
        return size
    if not _recorders.all:
        raise TypeError(f"expected a number, found the open dimension {size!r}")
    return _recorders.all[-1].at.value(size.terms)


# ---- guards ----


@dataclass(frozen=True)
class Guard:
    """A decision by an expression: whether it is ``equal`` to 0, or ``negative``."""

    kind: str
    terms: _Terms
    outcome: bool

    def holds(self, at: Mapping[str, int] | Evaluator) -> bool:
        """Whether the same is decided where the symbols are these numbers."""
        number = (at if isinstance(at, Evaluator) else Evaluator(at)).value(self.terms)
        return (number == 0 if self.kind == "equal" else number < 0) == self.outcome


class _Recorder:
    """What is decided in one block, and the numbers by which."""

    def __init__(self, numbers: Mapping[str, int] | Sizes) -> None:
        self.at = Evaluator(numbers)
        self.guards: dict[tuple, Guard] = {}
        self.found: set[str] = set()
        self.decisive: set[str] = set()


class _Recorders(threading.local):
    def __init__(self) -> None:
        self.all: list[_Recorder] = []


_recorders = _Recorders()


@contextmanager
def recorded(
    numbers: Mapping[str, int] | Sizes = MappingProxyType({"batch": TYPICAL_BATCH}),
) -> Iterator[dict[tuple, Guard]]:
    """Decides inside, in this thread, as for these numbers, and records all that depends on them.

    What an inner block records is its own: see :func:`record`.
    """
    recorder = _Recorder(numbers)
    _recorders.all.append(recorder)
    try:
        yield recorder.guards
    finally:
        _recorders.all.pop()


def record(guards: Iterable[Guard]) -> None:
    """Records earlier decisions as part of the current trace."""
    if _recorders.all:
        _recorders.all[-1].guards.update(((guard.kind, guard.terms), guard) for guard in guards)


def find(symbol: str, number: int) -> Dim:
    """Returns the dimension of a symbol that the block meets now, as this number unless it has one.

    The block must be one of :func:`recorded`: decisions by the symbol are noted, see :func:`decisive`.
    """
    recorder = _recorders.all[-1]
    recorder.at.set_default(symbol, number)
    recorder.found.add(symbol)
    return Dim.symbol(symbol)


def has_number(symbol: str) -> bool:
    """Whether a symbol has a number in the block of :func:`recorded`, if there is one."""
    return bool(_recorders.all) and symbol in _recorders.all[-1].at


def example_numbers() -> dict[str, int]:
    """Returns the numbers of all symbols by which the block of :func:`recorded` decides."""
    return _recorders.all[-1].at.numbers()


@contextmanager
def decisive() -> Iterator[set[str]]:
    """Yields the symbols of :func:`find` by which something is decided in the block, from outside on."""
    if not _recorders.all:
        yield set()
        return
    recorder = _recorders.all[-1]
    outside = recorder.decisive
    recorder.decisive = set(outside)
    try:
        yield recorder.decisive
    finally:
        recorder.decisive = outside


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
        outcome = _recorders.all[-1].at.value(terms) == 0
    else:
        if low is not None and low >= 0:
            return False
        if high is not None and high > 0:
            return True
        if not _recorders.all:
            raise TypeError(f"expected a number, found the open dimension {_dim(terms)!r}")
        outcome = _recorders.all[-1].at.value(terms) < 0
    record((Guard(kind, terms, outcome),))
    if (recorder := _recorders.all[-1]).found:
        recorder.decisive |= symbols_of(terms) & recorder.found
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
