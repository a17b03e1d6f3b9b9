"""Outputs of a call: the memory that they are written to, and how several are returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..devices import arrays
from ..errors import did_you_mean, expected
from ..graph.form import Form
from . import arguments


class Outputs(tuple):
    """The outputs of one call, in the network's order, by index or by exact name.

    ``outputs[0]``, ``outputs["/head/0"]`` and ``first, second = outputs`` all work.

    Args:
        arrays: name -> array.

    Attributes:
        names: of the outputs, in the same order.
    """

    names: tuple[str, ...]

    def __new__(cls, arrays: Mapping[str, Any]) -> Outputs:
        made = super().__new__(cls, arrays.values())
        made.names = tuple(arrays)
        return made

    def __getnewargs__(self) -> tuple[dict[str, Any]]:
        return (self.to_dict(),)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.names:
            hint = did_you_mean(key, self.names)
            raise KeyError(f"expected one of {', '.join(self.names)}, found {key!r}{hint}")
        return super().__getitem__(self.names.index(key))

    def to_dict(self) -> dict[str, Any]:
        """Returns name -> array."""
        return dict(zip(self.names, self, strict=True))

    def __repr__(self) -> str:
        return f"Outputs({self.to_dict()!r})"


def outputs_by_name(form: Form, out: Any) -> Mapping[str, Any]:
    """Returns ``out`` of :meth:`Engine.predict` by the names of outputs; empty where it is None.

    Raises:
        InputError: it has not one array for each output.
    """
    names = [value.name for value in form.outputs]
    if out is None:
        return {}
    if len(names) == 1 and not isinstance(out, Mapping):
        return {names[0]: out}
    given = out
    if not isinstance(out, Mapping):
        if not isinstance(out, Sequence) or len(out) != len(names):
            raise expected(
                "out", f"a mapping or a sequence of {len(names)} arrays", type(out).__name__
            )
        given = dict(zip(names, out, strict=True))
    if given.keys() != set(names):
        raise expected("out", ", ".join(names), ", ".join(map(str, given)) or "none")
    return given


def allocate_outputs(
    form: Form,
    given: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    found: Sequence[arrays.View],
    wanted: frozenset[str] | None = None,
) -> dict[str, arrays.View]:
    """Returns memory for outputs, in the network's order: ``given``, else new arrays.

    Args:
        found: the inputs.
        wanted: names of outputs; None: all.

    Raises:
        InputError: an array does not fit its output, or shares memory with another.
    """
    rooms: dict[str, arrays.View] = {}
    alone = len(form.outputs) == 1 and wanted is None
    for value in form.outputs:
        name, shape, dtype = value.name, shapes[value.name], value.dtype
        if wanted is not None and name not in wanted:
            continue
        if name in given:
            called = "out" if alone else f"out: {name}"
            beside = [*found, *rooms.values()]
            rooms[name] = arguments.room(called, given[name], shape, dtype, beside)
        elif found:
            rooms[name] = arrays.empty_beside(found[0], shape, dtype)
        else:
            rooms[name] = arrays.view(name, np.empty(shape, dtype), dtype=dtype)
    return rooms


def fits_output(out: Any, images: np.ndarray, row: tuple[int, ...]) -> bool:
    """Whether ``out`` can be filled with a row of shape ``row`` per image: the cheapest sufficient check."""
    return (
        type(out) is np.ndarray
        and out.shape == (len(images), *row)
        and out.dtype == np.float32
        and out.flags.carray  # contiguous and writable
        and not np.may_share_memory(out, images)
    )
