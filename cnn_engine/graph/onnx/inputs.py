"""The inputs of a model: types, open dimensions, and the shapes and constants that a caller gives."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import InputError, UnsupportedError
from ..dims import Dim
from ..graph import Value
from . import model as protobuf
from .input_dims import dims_of, example, text_of, usual_names


@dataclass(frozen=True)
class OpenInput:
    """An input of which not even the number of dimensions is known."""

    name: str


class Inputs:
    """The inputs of a model that has been parsed.

    Args:
        source: what errors call the model.
        protos: ONNX's records of the inputs.
        initializers: the names of those that have a value in the file, which are no inputs.
        shapes, constants: of :func:`.reading.load`.

    Attributes:
        constants: input -> its value, in the type and shape that the file states.

    Raises:
        InputError: a name is there twice or is no input's, or a constant does not fit.
    """

    def __init__(
        self,
        source: str,
        protos: Sequence[Any],
        initializers: Collection[str],
        shapes: Mapping[str, Sequence[int | None]],
        constants: Mapping[str, Any],
    ) -> None:
        self.source, self.shapes = source, shapes
        self._protos = [proto for proto in protos if proto.name not in initializers]
        self._check_names(constants)
        self.constants: dict[str, np.ndarray] = {
            proto.name: self._constant(proto, constants[proto.name])
            for proto in self._protos
            if proto.name in constants
        }

    def _check_names(self, constants: Mapping[str, Any]) -> None:
        names = [proto.name for proto in self._protos]
        if "" in names or len(set(names)) != len(names):
            raise InputError(f"{self.source}: expected inputs of unique names, found {names[:16]}")
        for given, what in ((self.shapes, "input_shape"), (constants, "constants")):
            unknown = [name for name in given if name not in names]
            if unknown:
                raise InputError(
                    f"{self.source}: {what}: expected inputs of the model ({', '.join(names[:16])}), "
                    f"found {unknown[0]!r}"
                )

    def _constant(self, proto, given: Any) -> np.ndarray:
        """Returns what ``constants`` says of an input, in the type and shape that the file states."""
        dims, dtype = self._type(proto)
        where = f"{self.source}: constants: {proto.name!r}"
        try:
            found = np.asarray(given)
            array = found.astype("float32" if dtype == "bfloat16" else dtype)
            exact = found.dtype.kind in "biuf" and (
                np.array_equal(array, found) or array.dtype.kind == found.dtype.kind == "f"
            )
        except (TypeError, ValueError, OverflowError):
            exact = False
        if not exact:
            raise InputError(f"{where}: expected {dtype}, found {_short(given)}")
        if (
            dims is not None
            and array.size == 1
            and all(d == 1 or not isinstance(d, int) for d in dims)
        ):
            array = array.reshape([1] * len(dims))  # a number, where the file has a row of one
        if dims is not None and (
            len(dims) != array.ndim
            or any(isinstance(d, int) and d != n for d, n in zip(dims, array.shape, strict=True))
        ):
            raise InputError(f"{where}: expected shape {text_of(dims)}, found {list(array.shape)}")
        return array

    def stated(self) -> tuple[list[Value | OpenInput], tuple[str, ...], int | None]:
        """Returns the inputs with symbols for open dimensions, the names of those with a batch, and it.

        The batch is None where nothing says how many.
        """
        types = {
            proto.name: self._type(proto)
            for proto in self._protos
            if proto.name not in self.constants
        }
        given = {name: self._given(name, known) for name, (known, _) in types.items()}
        # The first open dimension 0 is the batch's, and so is every dimension of its name.
        symbols = [
            known[0] for known, _ in types.values() if known and not isinstance(known[0], int)
        ]
        symbol = symbols[0] if symbols else None
        batched = [
            name for name, (known, _) in types.items()
            if known and not isinstance(known[0], int) and known[0] in (None, symbol)
        ]  # fmt: skip
        sizes = {given[name][0] for name in batched if isinstance(given[name][0], int)}
        if len(sizes) > 1:  # they share no batch: each stays as it is given
            batched = [name for name in batched if not isinstance(given[name][0], int)]
        batch = sizes.pop() if len(sizes) == 1 else None
        # A symbol that one input's shape fixes is fixed in all.
        fixed = {
            dim: size
            for name, (known, _) in types.items()
            for dim, size in zip(known or (), given[name] or (), strict=False)
            if isinstance(dim, str) and dim != symbol and isinstance(size, int)
        }
        taken = {dim for dims in given.values() for dim in dims or () if isinstance(dim, str)}
        found: list[Value | OpenInput] = []
        for name, (_, dtype) in types.items():
            if given[name] is None:
                found.append(OpenInput(name))
                continue
            shape: list[int | Dim] = []
            usual = usual_names(given[name])
            for axis, dim in enumerate(given[name]):
                if name in batched and axis == 0:
                    dim = symbol or "batch"
                elif isinstance(dim, str):
                    dim = fixed.get(dim, dim)
                elif dim is None:
                    dim = usual[axis] if usual[axis] not in taken else f"{name}.{usual[axis]}"
                    taken.add(dim)
                shape.append(Dim.symbol(dim) if isinstance(dim, str) else dim)
            found.append(Value(name, tuple(shape), "float32" if dtype == "bfloat16" else dtype))
        return found, tuple(batched), batch

    def _type(self, proto) -> tuple[list[int | str | None] | None, str]:
        """Returns the dimensions and the type of elements that the file states of an input."""
        where = f"{self.source}: input {proto.name!r}"
        if not proto.type.HasField("tensor_type"):
            kind = proto.type.WhichOneof("value") or "no type"
            raise UnsupportedError(f"{where}: expected a tensor, found {kind}")
        try:
            dtype = protobuf.dtype_name(proto.type.tensor_type.elem_type, True)
        except UnsupportedError as error:
            raise UnsupportedError(f"{where}: {error} are not supported") from None
        return dims_of(proto.type.tensor_type), dtype

    def _given(
        self, name: str, dims: list[int | str | None] | None
    ) -> list[int | str | None] | None:
        """Returns ``dims`` with what ``input_shape`` says of them; it may leave some open, as None."""
        given = self.shapes.get(name)
        if given is None:
            return dims
        sizes = [None if size is None else int(size) for size in given]
        fits = dims is None or (
            len(dims) == len(sizes)
            and all(
                d == g or g is None or not isinstance(d, int)
                for d, g in zip(dims, sizes, strict=True)
            )
        )
        if not fits or min((size for size in sizes if size is not None), default=0) < 0:
            raise InputError(
                f"{self.source}: input {name!r}: input_shape: expected a shape for {text_of(dims)}, "
                f"found {text_of(sizes)}"
            )
        if dims is None:
            return sizes
        return [d if g is None else g for d, g in zip(dims, sizes, strict=True)]

    def shapes_wanted(
        self, left: Sequence[Value | OpenInput], why: InputError | None = None
    ) -> InputError:
        """Returns the error that asks for the shapes of inputs, with a shape that would do for each."""
        dims = {
            value.name: None if isinstance(value, OpenInput) else list(value.shape)
            for value in left[:16]
        }
        shapes = {name: example(known) for name, known in dims.items()}
        found = ", ".join(f"{name!r} {text_of(known)}" for name, known in dims.items())
        options = " ".join(
            f"--input-shape {name}={','.join(map(str, shape))}" for name, shape in shapes.items()
        )
        python = ", ".join(f"{name!r}: {shape}" for name, shape in shapes.items())
        reason = "" if why is None else f" ({why})"
        return InputError(
            f"{self.source}: inputs: expected dimensions that the model can have, found {found}{reason}: "
            f"give shapes, such as {options} (input_shape={{{python}}})"
        )


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:60]}..."
