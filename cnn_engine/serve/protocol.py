"""Requests and responses of the Open Inference Protocol, the same for HTTP and gRPC.

The protocol is KServe 2 (https://github.com/kserve/open-inference-protocol), with extensions
of Triton: binary tensors, shared memory, classification, statistics and the model repository.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np

from .._cpu import FileMapping
from .errors import Refused, invalid
from .shared_memory import Regions

EXTENSIONS = [
    "binary_tensor_data", "classification", "model_configuration", "model_repository",
    "model_repository(unload_dependents)", "schedule_policy", "statistics", "system_shared_memory",
]  # fmt: skip

#: The protocol's types -> NumPy's.
DTYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}
_DTYPES = {datatype: np.dtype(dtype) for datatype, dtype in DTYPES.items()}
_DATATYPES = {dtype: datatype for datatype, dtype in _DTYPES.items()}

#: Parts of Triton's protocol that are refused.
CUDA_MEMORY, TRACING, LOGGING = "CUDA shared memory", "trace settings", "log settings"

#: Dimensions that a tensor may have.
MOST_DIMENSIONS = 16


@dataclass(frozen=True)
class SharedPart:
    """Part of a shared memory region that holds a tensor."""

    region: str
    offset: int
    byte_size: int


@dataclass
class Wanted:
    """An output that a request asks for.

    Attributes:
        binary: whether it follows the JSON as bytes; of HTTP.
        classes: of an output of scores, how many of the best are wanted as text; 0: the tensor itself.
        shared: the region that it goes to.
    """

    name: str
    binary: bool = False
    classes: int = 0
    shared: SharedPart | None = None


@dataclass
class Request:
    """A client's request.

    Attributes:
        inputs: name -> tensor.
        outputs: those that are wanted; empty: all.
        binary: whether outputs follow the JSON as bytes unless each says otherwise; of HTTP.
        priority: 0 is the model's usual one, 1 the most urgent; of equal ones the oldest goes first.
        timeout_s: seconds after which it is answered with an error if it still waits; 0: never.
        mapped: regions and their mappings, of inputs that are read where they lie.
    """

    inputs: dict[str, np.ndarray]
    outputs: list[Wanted] = field(default_factory=list)
    id: str = ""
    binary: bool = False
    priority: int = 0
    timeout_s: float = 0.0
    mapped: list[tuple[str, FileMapping]] = field(default_factory=list)

    def check_mapped(self) -> None:
        """Raises Refused where a region was cut while the network read it."""
        for name, mapping in self.mapped:
            if mapping.was_cut:
                raise invalid(f"shared memory region {name}", "the inputs", "less: it was cut")


@dataclass
class Answer:
    """One output of a response: ``data`` are its bytes, None where they lie in shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    array: np.ndarray | None
    wanted: Wanted


def dtype_of(name: str, datatype: Any) -> np.dtype:
    """Returns NumPy's type of a tensor.

    Raises:
        Refused: it is none that networks have.
    """
    found = _DTYPES.get(datatype) if isinstance(datatype, str) else None
    if found is None:
        raise invalid(f"{name}: datatype", f"one of {', '.join(DTYPES)}", repr(datatype))
    return found


def shape_of(name: str, shape: Any) -> tuple[int, ...]:
    """Returns a tensor's shape.

    Raises:
        Refused: it is none.
    """
    try:
        found = tuple(shape)
    except TypeError:
        found = (None,)
    if len(found) > MOST_DIMENSIONS or not all(
        isinstance(d, int) and not isinstance(d, bool) and 0 <= d < 2**31 for d in found
    ):
        raise invalid(f"{name}: shape", "whole numbers of at least 0", str(shape)[:80])
    return found


def nbytes_of(dtype: np.dtype, shape: Sequence[int]) -> int:
    """Returns the bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def from_bytes(name: str, dtype: np.dtype, shape: tuple[int, ...], data: Any) -> np.ndarray:
    """Returns a tensor over ``data``: its memory where that is aligned, else a copy.

    Args:
        data: bytes, a memoryview of bytes, or uint8 [N].

    Raises:
        Refused: ``data`` has more or fewer bytes.
    """
    if len(data) != nbytes_of(dtype, shape):
        wanted = f"{nbytes_of(dtype, shape)} bytes for {dtype} {list(shape)}"
        raise invalid(name, wanted, len(data))
    found = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
    return (found if found.flags.aligned else found.copy()).reshape(shape)


def shared_bytes(
    request: Request, part: SharedPart, regions: Regions, in_place: bool
) -> np.ndarray:
    """Returns the bytes of an input in shared memory, uint8 [N].

    Args:
        in_place: whether they are read where they lie, which ``request`` notes; else they are copied.

    Raises:
        Refused: the region is not registered, or does not hold them.
    """
    if not in_place:
        return regions.read(part.region, part.offset, part.byte_size)
    data, mapping = regions.map(part.region, part.offset, part.byte_size)
    request.mapped.append((part.region, mapping))
    return data


def from_list(name: str, dtype: np.dtype, shape: tuple[int, ...], data: Any) -> np.ndarray:
    """Returns a tensor of the numbers of JSON or gRPC, in lists flat or nested.

    Raises:
        Refused: they are no numbers, not of ``dtype``, or more or fewer than ``shape`` has.
    """
    try:
        found = np.asarray(data)
    except ValueError:
        found = np.asarray(None)
    if found.size == 0 and found.dtype.kind == "f":
        found = found.astype(dtype)
    # Numbers of JSON are whole, fractions, true or false; none is given a kind that it has not.
    kinds = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}[dtype.kind]
    if found.dtype.kind not in kinds:
        raise invalid(f"{name}: data", f"numbers of {dtype}", f"{found.dtype}")
    if found.size != math.prod(shape):
        raise invalid(f"{name}: data", f"{math.prod(shape)} numbers for {list(shape)}", found.size)
    if dtype.kind in "iu" and found.size:
        limits = np.iinfo(dtype)
        if int(found.min()) < limits.min or int(found.max()) > limits.max:
            raise invalid(f"{name}: data", f"{limits.min} to {limits.max} for {dtype}", "others")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(found, dtype).reshape(shape)


def shared_part(name: str, parameters: Mapping[str, Any]) -> SharedPart | None:
    """Returns where a tensor's parameters say that it lies; None: not in shared memory.

    Raises:
        Refused: the size or the offset is no whole number.
    """
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    offset, size = (
        parameters.get("shared_memory_offset", 0),
        parameters.get("shared_memory_byte_size"),
    )
    if not isinstance(region, str) or type(offset) is not int or type(size) is not int:
        wanted = "shared_memory_region, and whole numbers as shared_memory_byte_size and _offset"
        raise invalid(f"{name}: parameters", wanted, str(dict(parameters))[:200])
    return SharedPart(region, offset, size)


def wanted_output(name: Any, parameters: Mapping[str, Any], binary: bool) -> Wanted:
    """Returns an output that a request asks for.

    Raises:
        Refused: a parameter is at fault.
    """
    if not isinstance(name, str):
        raise invalid("outputs: name", "a text", repr(name)[:80])
    classes = parameters.get("classification", 0)
    if type(classes) is not int or classes < 0:
        raise invalid(f"{name}: classification", "a whole number of classes", repr(classes)[:80])
    return Wanted(
        name, parameters.get("binary_data", binary) is True, classes, shared_part(name, parameters)
    )


def options(request: Request, parameters: Mapping[str, Any]) -> None:
    """Sets a request's priority and timeout by its parameters.

    Raises:
        Refused: one of them is no whole number, or the request belongs to a sequence.
    """
    priority, timeout = parameters.get("priority", 0), parameters.get("timeout", 0)
    for name, value in (("priority", priority), ("timeout", timeout)):
        if type(value) is not int or value < 0:
            raise invalid(f"parameters: {name}", "a whole number of at least 0", repr(value)[:80])
    if parameters.get("sequence_id"):
        raise invalid("parameters", "no sequence_id, for networks here have no state", "one")
    request.priority, request.timeout_s = priority, timeout * 1e-6


def answers(
    request: Request,
    found: Mapping[str, np.ndarray],
    labels: Mapping[str, Sequence[str]],
    regions: Regions,
) -> list[Answer]:
    """Returns the outputs of a response; those that go to shared memory are written there.

    Args:
        found: name -> tensor.
        labels: output -> the names of its classes, where they are known.

    Raises:
        Refused: a region has no room.
    """
    wanted = request.outputs or [Wanted(name, request.binary) for name in found]
    made = []
    for one in wanted:
        array = np.ascontiguousarray(found[one.name])
        if one.classes:
            made.append(_classified(one, array, labels.get(one.name, ()), regions))
            continue
        datatype = _DATATYPES.get(array.dtype)
        if datatype is None:
            message = f"{one.name}: the protocol has no type for {array.dtype}"
            raise Refused(HTTPStatus.NOT_IMPLEMENTED, message)
        data: np.ndarray | None = array
        if one.shared is not None:
            _put(one, array.reshape(-1).view(np.uint8), regions)
            data = None
        made.append(Answer(one.name, datatype, array.shape, data, one))
    return made


def _put(wanted: Wanted, data: np.ndarray, regions: Regions) -> None:
    part = wanted.shared
    if data.size > part.byte_size:
        raise invalid(wanted.name, f"{data.size} bytes of shared memory", part.byte_size)
    regions.write(part.region, part.offset, data)


def _classified(
    wanted: Wanted, array: np.ndarray, names: Sequence[str], regions: Regions
) -> Answer:
    """Returns the best classes of each row as ``score:number:name``, the best first."""
    if array.dtype.kind != "f" or array.ndim < 1:
        raise invalid(f"{wanted.name}: classification", "an output of scores", array.dtype)
    rows = array.reshape(1, -1) if array.ndim == 1 else array.reshape(len(array), -1)
    count = min(wanted.classes, rows.shape[1])
    best = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    texts = [
        [f"{row[n]:f}:{n}{f':{names[n]}' if n < len(names) else ''}".encode() for n in order]
        for row, order in zip(rows, best, strict=True)
    ]
    shape = (count,) if array.ndim == 1 else (len(rows), count)
    found = np.array(texts, object).reshape(shape)
    if wanted.shared is not None:
        _put(wanted, np.frombuffer(text_bytes(found), np.uint8), regions)
        return Answer(wanted.name, "BYTES", shape, None, wanted)
    return Answer(wanted.name, "BYTES", shape, found, wanted)


def text_bytes(array: np.ndarray) -> bytes:
    """Returns texts as the protocol has them: each after its length, a little-endian uint32."""
    return b"".join(struct.pack("<I", len(text)) + text for text in array.flat)


def raw(answer: Answer) -> Any:
    """Returns the bytes of an output: a memoryview where it is a tensor."""
    if answer.datatype == "BYTES":
        return text_bytes(answer.array)
    return memoryview(answer.array.reshape(-1).view(np.uint8))
