"""ONNX's protobufs as NumPy has them, each claim checked against the bytes that are there.

Nothing is allocated for what a file says it has, only for what it has.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from pathlib import Path

import numpy as np

from ...errors import InputError, UnsupportedError, expected
from . import weights

#: The newest opset whose operators the converters were written against.
NEWEST_OPSET = 28
OLDEST_OPSET = 6

#: The largest tensor that is believed, in elements; dimensions of 0 do not hide others.
LARGEST = 2**40

#: ONNX's numbers of element types (TensorProto.DataType) and NumPy's names.
DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip

#: The same numbers by names.
NUMBERS = {name: number for number, name in DTYPES.items()}

#: Types that quantized tensors alone have, by their numbers; their arrays are of the package ``ml_dtypes``.
SMALL = {
    17: "float8_e4m3fn", 19: "float8_e5m2", 21: "uint4", 22: "int4", 23: "float4_e2m1fn", 25: "uint2",
    26: "int2",
}  # fmt: skip

#: Types of a file whose tensors are computed in float32. NumPy has no bfloat16: its arrays are float32.
NARROW = ("float16", "bfloat16")

#: Bits of an element, where they are fewer than 8.
_BITS = {"uint4": 4, "int4": 4, "float4_e2m1fn": 4, "uint2": 2, "int2": 2}

#: The field of a TensorProto that holds a type's elements where ``raw_data`` does not, and how.
_FIELDS = {
    "float32": ("float_data", np.float32),
    "float64": ("double_data", np.float64),
    "int64": ("int64_data", np.int64),
    "uint64": ("uint64_data", np.uint64),
    "uint32": ("uint64_data", np.uint64),
}


def package():
    """Returns the package ``onnx``.

    Raises:
        InputError: it is not installed; says what installs it.
    """
    try:
        import onnx
    except ImportError as error:
        raise InputError(
            f"expected the package onnx to read ONNX files, found none ({error}): "
            "pip install 'cnn-engine[onnx]'"
        ) from None
    return onnx


def messages():
    """Returns ONNX's messages, without the rest of the package: that takes 10 MiB of memory and more time
    than most models take to be read.

    Raises:
        InputError: the package is not installed.
    """
    name = "onnx.onnx_ml_pb2"
    if "onnx" in sys.modules:
        return package()
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.find_spec("onnx")
    path = Path(found.origin).with_name("onnx_ml_pb2.py") if found and found.origin else None
    if path is None or not path.is_file():
        return package()
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The package, if it is imported later, takes the same classes.
    return sys.modules.setdefault(name, module)


def dtype_name(number: int, quantized: bool = False) -> str:
    """Returns NumPy's name of ONNX's element type ``number``.

    Args:
        quantized: whether types that quantized tensors alone have are known.

    Raises:
        UnsupportedError: the engine has no such type.
    """
    if quantized and number in SMALL and importlib.util.find_spec("ml_dtypes"):
        importlib.import_module("ml_dtypes")  # NumPy knows the names from now on
        return SMALL[number]
    if number not in DTYPES:
        names = {v.number: v.name for v in package().TensorProto.DataType.DESCRIPTOR.values}
        raise UnsupportedError(f"elements of type {names.get(number, number)}")
    return DTYPES[number]


def read(source) -> tuple[object, str, Path | None]:
    """Returns (model, name, folder of external data) of a path, bytes or an ``onnx.ModelProto``.

    Raises:
        InputError: it cannot be read, or is not an ONNX model.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _parse(bytes(source), "model"), "model", None
    if not isinstance(source, (str, os.PathLike)):
        if isinstance(source, package().ModelProto):
            return source, source.graph.name or "model", None
        raise expected(
            "model", "a path, bytes or an onnx.ModelProto", f"{type(source).__module__}."
            f"{type(source).__qualname__}",
        )  # fmt: skip
    path = Path(source)
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe may never be written to, a device never end
            found = "a folder" if path.is_dir() else "a special file"
            raise InputError(f"{path}: expected an ONNX file, found {found}")
        if size >= 2**31:
            raise InputError(
                f"{path}: expected less than 2 GiB (the limit of protobuf; larger models keep their weights "
                f"in external data), found {size} bytes"
            )
        data = weights.without_weights(path) or path.read_bytes()
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        found = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"{path}: expected an ONNX file that can be read, found: {found}"
        ) from None
    return _parse(data, str(path)), str(path), path.parent


def _parse(data: bytes, name: str):
    model = messages().ModelProto()
    from google.protobuf.message import DecodeError

    try:
        model.ParseFromString(data)
    except (DecodeError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{name}: expected an ONNX model, found {len(data)} bytes: {reason}"
        ) from None
    if not model.HasField("graph"):
        raise InputError(
            f"{name}: expected an ONNX model, found {len(data)} bytes without a graph in them"
        )
    return model


def check_text(*names: str | bytes) -> None:
    """Raises InputError unless ``names`` are text; some versions of protobuf give invalid UTF-8 as bytes."""
    for name in names:
        if not isinstance(name, str):
            raise no_text(name)


def no_text(found: bytes) -> InputError:
    """Returns the error of a name that is no text."""
    return InputError(f"model: expected names in UTF-8, found the bytes {bytes(found)[:80]!r}")


def believable(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of ``shape`` can be: neither too large nor of too many dimensions."""
    return len(shape) <= 32 and math.prod(size for size in shape if size) <= LARGEST


def array(tensor, folder: Path | None = None) -> np.ndarray:
    """Returns the elements of a TensorProto.

    Args:
        folder: where external data is; None where there can be none.

    Returns:
        an array of its type, of float32 where that is bfloat16.

    Raises:
        InputError: it holds more or fewer bytes than its shape says, or external data that is not there.
        UnsupportedError: its element type is not known.
    """
    name = f"tensor {tensor.name!r}"
    try:
        kind = dtype_name(tensor.data_type, True)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from None
    dtype = np.dtype("uint16" if kind == "bfloat16" else kind)
    shape = tuple(tensor.dims)
    if min(shape, default=0) < 0 or len(shape) > 32:
        raise InputError(f"{name}: expected dimensions of at least 0, found {list(shape)[:33]}")
    if not believable(shape):
        raise InputError(f"{name}: expected at most 2^40 elements, found {list(shape)}")
    if tensor.HasField("segment"):
        raise UnsupportedError(f"{name}: expected a whole tensor, found a segment of one")
    if tensor.data_type in SMALL:
        return _packed(tensor, name, folder, kind, shape)
    if kind == "bfloat16":
        bits = _elements(tensor, name, folder, dtype, shape)
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return _elements(tensor, name, folder, dtype, shape)


def _packed(
    tensor, name: str, folder: Path | None, kind: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns a tensor of elements of at most 8 bits; of shorter ones several share a byte."""
    bits, size = _BITS.get(kind, 8), math.prod(shape)
    count = -(-size * bits // 8)
    if tensor.data_location == 1:
        data = np.array(_external(tensor, name, folder, np.dtype(np.uint8), count))
    elif tensor.HasField("raw_data"):
        data = np.frombuffer(tensor.raw_data, np.uint8)
    else:
        data = np.array(tensor.int32_data, np.int32).astype(np.uint8)
    if data.size != count:
        raise InputError(
            f"{name}: expected {count} bytes for {kind} {list(shape)}, found {data.size}"
        )
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (data[:, None] >> shifts & (2**bits - 1)).astype(np.uint8).reshape(-1)[:size]
    if kind.startswith("int"):  # two's complement
        numbers = (numbers ^ (1 << (bits - 1))).astype(np.int8) - np.int8(1 << (bits - 1))
    dtype = np.dtype(kind)
    found = numbers.astype(dtype) if "int" in kind else numbers.view(dtype)
    return found.reshape(shape)


def _elements(
    tensor, name: str, folder: Path | None, dtype: np.dtype, shape: tuple[int, ...]
) -> np.ndarray:
    size = math.prod(shape)
    nbytes = size * dtype.itemsize
    if tensor.data_location == 1:  # EXTERNAL
        return _external(tensor, name, folder, dtype, nbytes).reshape(shape)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != nbytes:
            raise InputError(
                f"{name}: expected {nbytes} bytes for {dtype.name} {list(shape)}, "
                f"found {len(tensor.raw_data)}"
            )
        found = np.frombuffer(tensor.raw_data, dtype.newbyteorder("<")).astype(dtype, copy=False)
        return found.reshape(shape)
    field, element = _FIELDS.get(dtype.name, ("int32_data", np.int32))
    elements = getattr(tensor, field)
    if len(elements) != size:
        raise InputError(
            f"{name}: expected {size} elements for {list(shape)}, found {len(elements)} in {field}"
        )
    values = np.array(elements, element)
    if dtype == np.float16:
        return values.astype(np.uint16).view(np.float16).reshape(shape)
    return values.astype(dtype).reshape(shape)


def _external(tensor, name: str, folder: Path | None, dtype, nbytes: int) -> np.ndarray:
    """Reads a tensor's bytes from the file that it names, which must lie in or under ``folder``."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise InputError(
            f"{name}: expected its data in the model, found it in {location!r}: load such a model by its path"
        )
    root = folder.resolve()
    try:
        path = (root / location).resolve()
        inside = bool(location) and path.is_relative_to(root) and "\0" not in location
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise InputError(f"{name}: expected external data beside the model, found {location!r}")
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or nbytes)
    except ValueError:
        raise InputError(
            f"{name}: expected whole numbers as offset and length of its data"
        ) from None
    try:
        if not path.is_file():
            raise InputError(f"{name}: expected the file {location!r} beside the model, found none")
        available = path.stat().st_size
        if length != nbytes or offset < 0 or offset + nbytes > available:
            raise InputError(
                f"{name}: expected {nbytes} bytes from {offset} in {location!r}, "
                f"found {length} claimed, {available} in the file"
            )
        element, count = dtype.newbyteorder("<"), nbytes // dtype.itemsize
        if nbytes < weights.LARGE_TENSOR:
            found = np.fromfile(path, element, count, offset=offset)
        else:
            found = weights.mapped(path, element, count, offset)
    except OSError as error:
        raise InputError(f"{name}: {location!r} cannot be read: {error.strerror}") from None
    return found.astype(dtype, copy=False)
