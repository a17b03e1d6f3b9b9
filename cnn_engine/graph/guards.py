"""Decisions by dimensions that are not known yet: recorded, they say for which sizes a graph is right."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from .terms import Evaluator, Numbers, Terms, least_of, symbols_of, text_of

#: What expressions of a batch are compared by while a graph is made, in place of a number that is not known:
#: a batch like many others, and no number of channels.
TYPICAL_BATCH = 13


@dataclass(frozen=True)
class Guard:
    """A decision by an expression: whether it is ``equal`` to 0, or ``negative``."""

    kind: str
    terms: Terms
    outcome: bool

    def holds(self, at: Mapping[str, int] | Evaluator) -> bool:
        """Whether the same is decided where the symbols are these numbers."""
        number = (at if isinstance(at, Evaluator) else Evaluator(at)).value(self.terms)
        return (number == 0 if self.kind == "equal" else number < 0) == self.outcome


class _Recorder:
    """What is decided in one block, and the numbers by which."""

    def __init__(self, numbers: Numbers) -> None:
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
    numbers: Numbers = MappingProxyType({"batch": TYPICAL_BATCH}),
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


def meet(symbol: str, number: int) -> None:
    """Notes a symbol that the block meets now, as this number unless it has one.

    The block must be one of :func:`recorded`: decisions by the symbol are noted, see :func:`decisive`.
    """
    recorder = _recorders.all[-1]
    recorder.at.set_default(symbol, number)
    recorder.found.add(symbol)


def has_number(symbol: str) -> bool:
    """Whether a symbol has a number in the block of :func:`recorded`, if there is one."""
    return bool(_recorders.all) and symbol in _recorders.all[-1].at


def example_numbers() -> dict[str, int]:
    """Returns the numbers of all symbols by which the block of :func:`recorded` decides."""
    return _recorders.all[-1].at.numbers()


@contextmanager
def decisive() -> Iterator[set[str]]:
    """Yields the symbols of :func:`meet` by which something is decided in the block, from outside on."""
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


def is_recorded() -> bool:
    """Whether the block is one of :func:`recorded`."""
    return bool(_recorders.all)


def example_of(terms: Terms) -> int:
    """Returns the number of an expression by which the block of :func:`recorded` decides.

    Raises:
        TypeError: nothing is recorded, so that there is no number.
    """
    if not _recorders.all:
        raise _no_number(terms)
    return _recorders.all[-1].at.value(terms)


def _no_number(terms: Terms) -> TypeError:
    return TypeError(f"expected a number, found the open dimension {text_of(terms)}")


def decide(kind: str, terms: Terms) -> bool:
    """Returns whether an expression is 0, or less; records it where that depends on a symbol.

    Where nothing is recorded, expressions are equal if they are written alike, and have no order.

    Raises:
        TypeError: the order depends on a symbol, and nothing is recorded.
    """
    low, high = least_of(terms), least_of(terms, -1)  # the expression is in [low, -high]
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
            raise _no_number(terms)
        outcome = _recorders.all[-1].at.value(terms) < 0
    record((Guard(kind, terms, outcome),))
    if (recorder := _recorders.all[-1]).found:
        recorder.decisive |= symbols_of(terms) & recorder.found
    return outcome
