"""Sums of products of symbols, of which dimensions are made: their arithmetic, bounds and numbers.

A term is (factors, coefficient). A factor is a symbol or a :class:`Compound`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

#: Characters that part of an expression is printed in; of a longer one, a digest is.
LONGEST_TEXT = 400

#: Sums and products that are remembered: layers of a network compare the same sizes again and again.
MOST_KNOWN = 4096


class Compound:
    """A factor that is no symbol: ``floor``, ``min`` or ``max`` of two expressions; each exists once."""

    __slots__ = ("__weakref__", "first", "kind", "second", "text")

    _all: WeakValueDictionary[tuple, Compound] = WeakValueDictionary()

    def __new__(cls, kind: str, first: Terms, second: Terms) -> Compound:
        key = kind, first, second
        found = cls._all.get(key)
        if found is None:
            found = object.__new__(cls)
            found.kind, found.first, found.second = key
            a, b = text_of(first), text_of(second)
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
        return Compound, (self.kind, self.first, self.second)

    def __repr__(self) -> str:
        return self.text


#: The sum of products that an expression is: ((factors), coefficient), sorted. Factors are symbols or parts.
Terms = tuple[tuple[tuple[Any, ...], int], ...]


def text_of(terms: Terms) -> str:
    """Returns terms as people write them."""
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


#: What symbols are: symbol -> number.
Numbers = Mapping[str, int] | Iterable[tuple[str, int]]


class Evaluator:
    """Computes expressions where symbols are these numbers, each part of them once."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = dict(numbers)
        self._known: dict[Any, int] = {}

    def __call__(self, dim: Any) -> int:
        """Returns the number of a :class:`.dims.Dim`."""
        return self.value(dim.terms)

    def __contains__(self, symbol: str) -> bool:
        return symbol in self._numbers

    def set_default(self, symbol: str, number: int) -> None:
        """Gives a symbol its number where it has none."""
        self._numbers.setdefault(symbol, number)

    def numbers(self) -> dict[str, int]:
        """Returns the numbers of all symbols."""
        return dict(self._numbers)

    def value(self, terms: Terms) -> int:
        """Returns the number of a sum of products."""
        total = 0
        for factors, coefficient in terms:
            for factor in factors:
                coefficient *= self._numbers[factor] if type(factor) is str else self._part(factor)
            total += coefficient
        return total

    def _part(self, part: Compound) -> int:
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


def least_of(terms: Terms, sign: int = 1) -> int | None:
    """Returns a number that ``sign`` times the expression is never less than, or None where none is known."""
    total = 0
    for factors, coefficient in terms:
        if factors and sign * coefficient < 0:
            return None
        bound = sign * coefficient
        for factor in factors:
            least = lowest(factor) if type(factor) is str else _least_of_compound(factor)
            if least is None or least < 0:
                return None
            bound *= least
        total += bound
    return total


def _least_of_compound(part: Compound) -> int | None:
    """Returns a number that a part is never less than, or None where none is known."""
    first, second = least_of(part.first), least_of(part.second)
    if part.kind == "max":
        return max((bound for bound in (first, second) if bound is not None), default=None)
    if first is None or second is None:
        return None
    if part.kind == "min":
        return min(first, second)
    if second < 1 or first < 0:
        return None
    number = number_of(part.second)
    return 0 if number is None else first // number


def terms_of(number: int) -> Terms:
    """Returns the terms that a number is."""
    return (((), number),) if number else ()


def number_of(terms: Terms) -> int | None:
    """Returns the number that terms are, or None where they have a symbol."""
    if not terms:
        return 0
    return terms[0][1] if len(terms) == 1 and not terms[0][0] else None


def symbols_of(terms: Terms) -> frozenset[str]:
    """Returns the names of all symbols in a sum of products."""
    found: set[str] = set()
    for factors, _ in terms:
        for factor in factors:
            if type(factor) is str:
                found.add(factor)
            else:
                found |= symbols_of(factor.first) | symbols_of(factor.second)
    return frozenset(found)


def _gathered(terms: Iterable[tuple[tuple, int]]) -> Terms:
    found: dict[tuple, int] = {}
    for factors, coefficient in terms:
        found[factors] = found.get(factors, 0) + coefficient
    kept = ((factors, number) for factors, number in found.items() if number)
    # Numbers come last, as people write them; the rest by what it prints as.
    return tuple(sorted(kept, key=_order)) if len(found) > 1 else tuple(kept)


def _order(term: tuple[tuple, int]) -> tuple:
    return not term[0], tuple(map(str, term[0]))


@lru_cache(MOST_KNOWN)
def sum_of(a: Terms, b: Terms) -> Terms:
    """Returns ``a + b``."""
    return _gathered((*a, *b))


@lru_cache(MOST_KNOWN)
def product_of(a: Terms, b: Terms) -> Terms:
    """Returns ``a * b``."""
    return _gathered(
        (tuple(sorted((*x, *y), key=str)) if x and y else x or y, m * n) for x, m in a for y, n in b
    )


def quotient_of(a: Terms, b: Terms) -> Terms:
    """Returns ``a // b``.

    Raises:
        ZeroDivisionError: ``b`` is 0.
    """
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
                return sum_of(_gathered(whole), quotient_of(inner, (((), product),)))
        return sum_of(_gathered(whole), (((Compound("floor", rest, b),), 1),))
    return (((), 1),) if a == b else (((Compound("floor", a, b),), 1),)


def _flattened(terms: Terms, number: int) -> tuple[Terms, int]:
    """Returns what (terms // number) is as a division of its inner numerator: (a // m + k) // n is one."""
    inner = [term for term in terms if term[0]]
    if len(inner) != 1 or inner[0][1] != 1 or len(inner[0][0]) != 1:
        return terms, number
    ((part,), _) = inner[0]
    divisor = None if type(part) is str or part.kind != "floor" else number_of(part.second)
    if divisor is None or divisor <= 0:
        return terms, number
    offset = sum(coefficient for factors, coefficient in terms if not factors)
    return sum_of(part.first, terms_of(offset * divisor)), divisor * number
