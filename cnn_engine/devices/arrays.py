"""Arrays of any library as operators see them: address, shape, type, device."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError, UnsupportedError

CPU = -1

#: The handle of CUDA's per-thread default stream (cudaStreamPerThread): another stream in every thread.
PER_THREAD_STREAM = 2


@dataclass(frozen=True)
class View:
    """A C-contiguous array as the kernels see it.

    Attributes:
        address: of the first element.
        shape: its dimensions.
        device: the CUDA device's number, or ``CPU``.
        array: the array itself, kept alive by the view.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    device: int
    array: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def overlaps(self, other: View) -> bool:
        """Whether the two share memory."""
        return (
            self.nbytes > 0
            and other.nbytes > 0
            and self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
        )


def view(
    name: str,
    array: Any,
    *,
    dtype: str = "float32",
    ndim: int | None = None,
    shape: tuple[int, ...] | None = None,
    writable: bool = False,
) -> View:
    """Looks at ``array`` without copying it.

    Takes a NumPy array (or what NumPy reads without a copy), anything with
    ``__cuda_array_interface__`` (CuPy, PyTorch, Numba, JAX), or anything with DLPack.

    Raises:
        InputError: it is no array, or not of the type, shape or layout that is expected.
    """
    array = _importable(name, array)
    if isinstance(array, np.ndarray):
        interface, kind = array.__array_interface__, array.dtype  # ml_dtypes' have no type string
        device = CPU
    else:
        interface = array.__cuda_array_interface__
        kind = np.dtype(interface["typestr"])
        device = _cuda_device(name, array, interface["data"][0])
    found = View(
        address=interface["data"][0],
        shape=tuple(interface["shape"]),
        dtype=kind,
        device=device,
        array=array,
    )
    if found.dtype != np.dtype(dtype):
        raise InputError(f"{name}: expected {dtype}, found {found.dtype}")
    if shape is not None and found.shape != shape:
        raise InputError(f"{name}: expected shape {list(shape)}, found {list(found.shape)}")
    if ndim is not None and len(found.shape) != ndim:
        raise InputError(
            f"{name}: expected {ndim} dimensions, found {len(found.shape)} (shape {list(found.shape)})"
        )
    if not _is_contiguous(found.shape, interface.get("strides"), found.dtype.itemsize):
        raise InputError(
            f"{name}: expected a C-contiguous array, found strides {list(interface['strides'])} for "
            f"shape {list(found.shape)}; numpy.ascontiguousarray(x), or x.contiguous(), makes one"
        )
    if writable and interface["data"][1]:
        raise InputError(f"{name}: expected a writable array, found a read-only one")
    return found


def empty_beside(other: View, shape: tuple[int, ...], dtype: str = "float32") -> View:
    """Returns a new array on the device of ``other``, of the same library where that is known."""
    if other.device == CPU:
        return view("out", np.empty(shape, dtype), dtype=dtype)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(other.array, torch.Tensor):
        made = torch.empty(shape, dtype=getattr(torch, dtype), device=other.array.device)
        return view("out", made, dtype=dtype)
    cupy = import_cupy("allocating an output (or pass out=)")
    with cupy.cuda.Device(other.device):
        return view("out", cupy.empty(shape, dtype), dtype=dtype)


def current_stream(other: View) -> int:
    """Returns the handle of the stream that the library of ``other`` works on at present."""
    return stream_of(other)[0]


def stream_of(other: View) -> tuple[int, Any]:
    """Returns the handle of an array's stream and its owner; None where no stream is known."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(other.array, torch.Tensor):
        stream = torch.cuda.current_stream(other.device)
        return stream.cuda_stream, stream
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(other.array, cupy.ndarray):
        stream = cupy.cuda.get_current_stream(other.device)
        return stream.ptr, stream if isinstance(stream, cupy.cuda.Stream) else None
    return other.array.__cuda_array_interface__.get("stream") or 0, None


def stream_owner(stream: int) -> int:
    """Returns the key of streams that share a handle: the thread, for CUDA's per-thread default stream."""
    return threading.get_ident() if stream == PER_THREAD_STREAM else 0


def glance(images: Any, out: Any) -> tuple[tuple, int, int | None] | None:
    """Returns the key of a call with two device arrays, and their addresses.

    At a fraction of the cost of :func:`view`, which a call with an equal key has passed before. ``out`` may
    be None, and its address is then too. None for arrays that are not CuPy's, or PyTorch's without gradients,
    both of one library, or that are not contiguous, or overlap.
    """
    kind = type(images)
    if out is not None and type(out) is not kind:
        return None
    target = None
    cupy = sys.modules.get("cupy")
    if cupy is not None and kind is cupy.ndarray:
        data = images.data
        if not images.flags.c_contiguous:
            return None
        stream = cupy.cuda.get_current_stream(data.device_id).ptr
        key: tuple = (kind, stream, images.shape, images.dtype, data.device_id)
        source = data.ptr
        if out is not None:
            if not out.flags.c_contiguous:
                return None
            key += (out.shape, out.dtype, out.data.device_id)
            target = out.data.ptr
    elif (torch := sys.modules.get("torch")) is not None and kind is torch.Tensor:
        if not images.is_cuda or images.requires_grad or not images.is_contiguous():
            return None
        stream = torch.cuda.current_stream(images.device).cuda_stream
        key = (kind, stream, images.shape, images.dtype, images.device)
        source = images.data_ptr()
        if out is not None:
            if out.requires_grad or not out.is_contiguous():
                return None
            key += (out.shape, out.dtype, out.device)
            target = out.data_ptr()
    else:
        return None
    if stream == PER_THREAD_STREAM:
        key += (stream_owner(stream),)
    if out is not None and source < target + out.nbytes and target < source + images.nbytes:
        return None
    return key, source, target


def empty_rows(images: Any, row: tuple[int, ...]) -> tuple[Any, int]:
    """Returns a new float32 array with a row for each of ``images``, on their device, and its address.

    It is CuPy's or PyTorch's, as they are.

    Args:
        row: the shape of one.
    """
    shape = (images.shape[0], *row)
    cupy = sys.modules.get("cupy")
    if cupy is not None and type(images) is cupy.ndarray:
        device = images.data.device_id
        if device == cupy.cuda.runtime.getDevice():  # to enter a device costs a microsecond
            rows = cupy.empty(shape, np.float32)
        else:
            with cupy.cuda.Device(device):
                rows = cupy.empty(shape, np.float32)
        return rows, rows.data.ptr
    import torch

    rows = torch.empty(shape, dtype=torch.float32, device=images.device)
    return rows, rows.data_ptr()


def stream_handle(stream: Any) -> int:
    """Returns the handle of a stream given as a number, or as CuPy's, PyTorch's or Numba's object.

    Raises:
        InputError: it is none of these.
    """
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for candidate in (
        stream,
        *(getattr(stream, a, None) for a in ("ptr", "cuda_stream", "handle")),
    ):
        if isinstance(candidate, int) and not isinstance(candidate, bool) and candidate >= 0:
            return candidate
        if hasattr(candidate, "value"):  # ctypes' pointer, as Numba gives
            return candidate.value or 0
    raise InputError(f"stream: expected a CUDA stream or its handle, found {stream!r}")


def import_cupy(purpose: str):
    """Returns the module CuPy.

    Raises:
        UnsupportedError: it is not installed or cannot be imported; says how to get it.
    """
    try:
        import cupy
    except Exception as error:  # CuPy raises what the CUDA libraries raise
        raise UnsupportedError(
            f"CuPy: needed for {purpose}, found: {error}; "
            "install the extra cnn-engine[cuda13] or cnn-engine[cuda12]"
        ) from error
    return cupy


def _importable(name: str, array: Any) -> Any:
    """Returns ``array``, or a view of it that has one of the two array interfaces."""
    if isinstance(array, np.ndarray) or _has_cuda_interface(array):
        return array
    if isinstance(array, np.generic):  # what indexing makes of an array of no dimensions
        return np.asarray(array)
    if hasattr(array, "__dlpack_device__"):
        try:
            if array.__dlpack_device__()[0] == 1:  # kDLCPU
                return np.from_dlpack(array)
            return import_cupy(f"reading {name} through DLPack").from_dlpack(array)
        except (BufferError, RuntimeError, TypeError) as error:
            raise InputError(f"{name}: expected an array, found DLPack's error: {error}") from error
    raise InputError(
        f"{name}: expected a NumPy array or an array on a CUDA device, found {type(array).__name__}"
    )


def _has_cuda_interface(array: Any) -> bool:
    try:
        return hasattr(array, "__cuda_array_interface__")
    except Exception:  # PyTorch raises TypeError and RuntimeError for tensors that cannot be viewed
        return False


def _cuda_device(name: str, array: Any, address: int) -> int:
    from . import cuda_module

    _cuda = cuda_module.load()
    if address == 0:  # an empty array
        return _cuda.get_device()
    device = _cuda.pointer_device(address)
    if device < 0:
        raise InputError(f"{name}: expected memory of a CUDA device, found address {address:#x}")
    return device


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    if strides is None or math.prod(shape) == 0:
        return True
    step = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
