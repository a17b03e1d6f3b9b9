"""The compiled module, as CPU kernels see it: functions of a shape take open dimensions, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from .. import _cpu as compiled
from ..graph.dims import Dim

#: How structs of shapes end, and functions from these to a number.
_OF_SHAPES = ("Shape", "Pitches", "_packed", "_workspace")


@dataclass(frozen=True)
class Deferred:
    """A call that is made once its arguments are numbers: some of them are open dimensions."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class _Native:
    """Has the attributes of the compiled module."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(compiled, name)
        return _deferring(found) if name.endswith(_OF_SHAPES) else found


@cache
def _deferring(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if type(argument) in (Dim, Deferred):
                return Deferred(function, arguments)
        return function(*arguments)

    return call


_cpu = _Native()
