"""A CUDA device: memory, copies, events and one stream of its own, through CuPy."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from ..errors import DeviceError, UnsupportedError, expected
from ..target import Target
from . import Buffer, arrays, cuda_module

#: Threads that read files for a GPU, and bytes of each of the two pieces that a thread has: few enough that
#: they stay in the processor's caches.
READERS, READ_PIECE = 8, 4 << 20

#: The host, where pages of managed memory are moved to: cudaCpuDeviceId.
HOST = -1

#: What CUDA graphs use, by the number that they hold in its stead, and the device that it is of.
_IN_GRAPHS: dict[int, tuple[CudaDevice, Any]] = {}
_numbers = itertools.count()


class CudaDevice:
    """CUDA device ``index`` and a stream on it, on which all of an engine's work runs in order."""

    kind = "cuda"
    note: str | None = None  # why it was chosen, for the report
    _apart = False  # whether memory is its own, of no pool

    def __init__(self, index: int) -> None:
        cupy = arrays.import_cupy("CUDA work")
        self.index = index
        self.name = f"cuda:{index}"
        self.kernels = cuda_module.load()
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        try:
            self.context = _Context(index, cupy)
            with self.context:
                self.stream = cupy.cuda.Stream(non_blocking=True)
            self.properties: dict[str, Any] = self.kernels.device_properties(index)
        except Exception as error:  # CuPy's and ours: the driver refused
            raise UnsupportedError(
                f"{self.name}: expected a usable device, found: {error}"
            ) from error
        self.stream_handle = self.stream.ptr
        self._alone = self.kernels.device_count()[0] == 1

    def __del__(self) -> None:
        # CuPy destroys a stream with the runtime, which makes a context on its first device where none is
        # current.
        with contextlib.suppress(Exception), self.context:
            del self.stream

    def lane(self) -> CudaDevice:
        """Returns the same device with another stream, whose work may overlap with this one's."""
        other = copy.copy(self)
        with self.context:
            other.stream = self._cupy.cuda.Stream(non_blocking=True)
        other.stream_handle = other.stream.ptr
        return other

    def on(self, stream: int, apart: bool = False) -> CudaDevice:
        """Returns the same device with a stream of the caller's, given by its handle.

        Args:
            apart: whether memory comes from CUDA itself, not from CuPy's pool, whose memory other work of the
                stream may still use.
        """
        other = copy.copy(self)
        other._apart = apart
        made = getattr(self._cupy.cuda.Stream, "from_external", None)
        with self.context:
            if made is None:  # CuPy before 14
                other.stream = self._cupy.cuda.ExternalStream(stream)
            else:
                other.stream = made(_Handle(stream))
        other.stream_handle = stream
        return other

    @property
    def model(self) -> str:
        """The GPU's name."""
        return self.properties["name"]

    @property
    def target(self) -> Target:
        """The GPU's capabilities, by which kernels are chosen."""
        return cuda_module.target(self.index)

    @property
    def pci_bus_id(self) -> str:
        """The GPU's address on the bus, such as ``0000:1B:00.0``."""
        return self.context.pci_bus_id

    def free_memory(self) -> int:
        """Bytes that can be allocated, including free bytes of CuPy's pool."""
        with self.context:
            free, _ = self._runtime.memGetInfo()
            return free + self._cupy.get_default_memory_pool().free_bytes()

    def sleep_while_waiting(self) -> None:
        """Lets this process's threads sleep until the device is done, for other work to have their cores.

        By default they poll, and know some microseconds sooner.
        """
        self.kernels.sleep_while_waiting(self.index)

    def allocate(self, nbytes: int) -> Buffer:
        """Returns ``nbytes`` of device memory."""
        with self.context, self.stream:
            try:
                if self._apart:
                    memory = self._cupy.cuda.Memory(max(nbytes, 1))
                    pointer = self._cupy.cuda.MemoryPointer(memory, 0)
                else:
                    pointer = self._cupy.cuda.alloc(max(nbytes, 1))
            except self._cupy.cuda.memory.OutOfMemoryError as error:
                raise DeviceError(
                    f"{self.name}: cannot allocate {nbytes} bytes: {error}"
                ) from error
        return Buffer(pointer.ptr, nbytes, pointer)

    def allocate_managed(self, nbytes: int) -> Buffer:
        """Returns ``nbytes`` that host and device both reach, moved by the driver page by page."""
        with self.context:
            pointer = self._cupy.cuda.malloc_managed(max(nbytes, 1))
        return Buffer(pointer.ptr, nbytes, pointer)

    def prefetch(self, address: int, nbytes: int, to_host: bool) -> None:
        """Queues the move of pages of managed memory to the device, or to the host."""
        to = HOST if to_host else self.index
        self._runtime.memPrefetchAsync(address, nbytes, to, self.stream_handle)

    def empty_pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Returns a NumPy array in page-locked memory, which the GPU copies without staging."""
        dtype = np.dtype(dtype)
        size = math.prod(shape)
        with self.context:
            memory = self._cupy.cuda.alloc_pinned_memory(max(size * dtype.itemsize, 1))
        return np.frombuffer(memory, dtype, size).reshape(shape)

    def is_pinned(self, address: int) -> bool:
        """Whether host memory at ``address`` is page-locked."""
        return address != 0 and self.kernels.pointer_device(address) >= 0

    def file_reader(self, threads: int) -> Any:
        """Returns a reader of files into device memory, with threads of its own."""
        return self.kernels.FileReader(self.index, min(threads, READERS), READ_PIECE)

    def upload(self, array: np.ndarray) -> Buffer:
        """Returns a copy of ``array`` in device memory, complete on return."""
        buffer = self.allocate(array.nbytes)
        # A copy that is queued while its stream is captured is made by the graph, and cannot be waited for.
        device = self.lane() if self.is_capturing(self.stream_handle) else self
        device.copy_h2d(buffer.address, array.__array_interface__["data"][0], array.nbytes)
        device.synchronize()
        return buffer

    def copy_h2d(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        """Queues a copy of host memory; pageable memory may be reused on return.

        On ``stream``, of the same device, or the device's own.
        """
        queue = self.stream_handle if stream is None else stream
        self._runtime.memcpyAsync(to, source, nbytes, 1, queue)

    def copy_d2h(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        """Queues a copy to host memory; wait before reading it. The stream is as above."""
        queue = self.stream_handle if stream is None else stream
        self._runtime.memcpyAsync(to, source, nbytes, 2, queue)

    def reaches(self, other: CudaDevice) -> bool:
        """Lets copies to ``other`` go past the host from now on; returns whether they can."""
        if not self._runtime.deviceCanAccessPeer(self.index, other.index):
            return False
        with self.context:
            _reach(self._runtime, self.index, other.index)
        return True

    def copy_to_peer(self, other: CudaDevice, to: int, source: int, nbytes: int) -> None:
        """Queues a copy to memory of another device, past the host where it :meth:`reaches` that."""
        self._runtime.memcpyPeerAsync(
            to, other.index, source, self.index, nbytes, self.stream_handle
        )

    def queue_copy(self, to: int, source: int, nbytes: int) -> None:
        """Queues a copy between memory of the device and page-locked memory, in microseconds.

        The interpreter's lock is kept, as by a launch: to have it back takes longer where threads want it.
        """
        self.kernels.queue_copy(to, source, nbytes, self.stream_handle)

    def is_current(self) -> bool:
        """Whether it is the calling thread's current device, on which kernels are launched."""
        return self._alone or self._runtime.getDevice() == self.index

    def is_capturing(self, stream: int) -> bool:
        """Whether work queued on ``stream`` becomes part of a CUDA graph."""
        return bool(self._runtime.streamIsCapturing(stream))

    def stream_id(self, stream: int) -> int:
        """Returns a stream's unique id, which differs from earlier streams with the same handle.

        -1: it is captured.
        """
        return self.kernels.stream_id(stream)

    def capture_id(self, stream: int) -> int:
        """Returns the number of the capture that ``stream`` is part of."""
        return self.kernels.capture_id(stream)

    @contextlib.contextmanager
    def while_captured(self) -> Iterator[None]:
        """Lets this thread allocate memory and wait for other streams during a capture.

        All that a capture usually forbids a thread is what could be meant to be part of it.
        """
        exchange = self.kernels.exchange_capture_mode
        with self.context:
            before = exchange(self.kernels.relaxed_capture_mode)
            try:
                yield
            finally:
                exchange(before)

    def keep_in_graph(self, stream: int, used: Any) -> None:
        """Keeps ``used`` until the graph that ``stream`` is captured into, and all made of it, are gone."""
        number = next(_numbers)
        _IN_GRAPHS[number] = self, used
        try:
            self.kernels.hold_in_graph(stream, number)
        except BaseException:
            del _IN_GRAPHS[number]
            raise

    def release_graphs(self) -> None:
        """Frees memory of deleted graphs. Must not be called while this thread captures."""
        for number in self.kernels.released_by_graphs():
            device, used = _IN_GRAPHS.pop(number)
            with device.while_captured():  # other threads may capture
                del used

    def wait_for(self, streams: dict[int, Any]) -> bool:
        """Waits for the work queued on streams by now; returns whether all of it ended.

        Not what is queued on a stream that is captured at present.

        Args:
            streams: by their handles; None in the place of a stream that may be gone: then it is all of the
                device's work that is waited for.
        """
        done = True
        with self.while_captured():
            for handle, stream in streams.items():
                with contextlib.suppress(self._runtime.CUDARuntimeError):
                    if stream is None:
                        self._runtime.deviceSynchronize()
                    elif self.is_capturing(handle):
                        done = False
                    else:
                        self._runtime.streamSynchronize(handle)
        return done

    def capture(self, run: Callable[[int], None]) -> tuple[Callable[..., None], list[Any]]:
        """Captures the work that ``run`` queues into a CUDA graph; returns the call that launches it.

        Only what this thread does counts: others may go on with the device meanwhile.
        """
        runtime = self._runtime
        with self.context:
            stream = self._cupy.cuda.Stream(non_blocking=True)
            stream.begin_capture(runtime.streamCaptureModeThreadLocal)
            try:
                run(stream.ptr)
            except BaseException:
                with contextlib.suppress(Exception):  # it says once more what failed
                    stream.end_capture()
                raise
            graph = _Launched(stream.end_capture(), runtime.graphLaunch, self.context)
            del stream
        return graph, [self.stream_handle]

    def beside(self, stream: int, run: Callable[[int], object]) -> Callable[[], None]:
        """Queues the work of ``run`` on a second stream, after the work that ``stream`` has by now.

        Returns what has ``stream`` wait for it. While ``stream`` is captured, that is a branch of its graph.
        """
        with self.context:
            side = self._cupy.cuda.Stream(non_blocking=True)
            begin, end = (self._cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self._runtime.eventRecord(begin.ptr, stream)
        self._runtime.streamWaitEvent(side.ptr, begin.ptr)
        run(side.ptr)
        self._runtime.eventRecord(end.ptr, side.ptr)
        return partial(self._wait, stream, side, end)

    def _wait(self, stream: int, side: Any, end: Any) -> None:
        """Has ``stream`` wait for an event of ``side``, which is kept until then."""
        self._runtime.streamWaitEvent(stream, end.ptr)

    def synchronize(self) -> None:
        """Waits for everything queued on the stream.

        Raises:
            DeviceError: a kernel failed.
        """
        try:
            self.stream.synchronize()
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(f"{self.name}: {error}") from error

    def synchronize_streams(self) -> None:
        """Waits for everything queued on any stream of the device.

        Raises:
            DeviceError: a kernel failed.
        """
        try:
            with self.context:
                self._runtime.deviceSynchronize()
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(f"{self.name}: {error}") from error

    def event(self) -> Any:
        """Returns a new event with timing, not yet recorded."""
        with self.context:
            return self._cupy.cuda.Event()

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Seconds between two events that have both been reached."""
        return self._cupy.cuda.get_elapsed_time(start, end) * 1e-3

    def delay(self, seconds: float) -> None:
        """Occupies the stream for about ``seconds``."""
        self.kernels.delay(int(seconds * 1e9), self.stream_handle)

    def check_managed(self, nbytes: int, option: str = "data_mode managed") -> None:
        """Raises UnsupportedError where ``nbytes`` of managed memory are too much, or cannot be had.

        The limit is a quarter of the card's free memory: past what is free, the driver moves pages to and
        fro without end and the whole card can stall.
        """
        if not self.properties["managed_memory"]:
            raise UnsupportedError(f"{option}: {self.model} has no managed memory")
        free = self.free_memory()
        if nbytes > free // 4:
            raise expected(
                option,
                f"at most a quarter of the card's free memory ({free // 4 / 2**20:.0f} MiB)",
                f"{nbytes / 2**20:.0f} MiB; use a smaller batch",
            )


@cache  # the driver refuses to be asked twice
def _reach(runtime: Any, index: int, other: int) -> None:
    runtime.deviceEnablePeerAccess(other)


class _Context(cuda_module.Current):
    """Makes a device current; has what CuPy says of it."""

    def __init__(self, index: int, cupy: Any) -> None:
        super().__init__(index)
        self._device = cupy.cuda.Device(index)

    @property
    def attributes(self) -> dict[str, int]:
        """The device's attributes in CUDA, by name."""
        return self._device.attributes

    @property
    def pci_bus_id(self) -> str:
        return self._device.pci_bus_id


class _Launched:
    """A graph, which is kept for as long as this; called with a stream, it is launched there."""

    __slots__ = ("_context", "_graph", "_handle", "_launch")

    def __init__(self, graph: Any, launch: Callable[[int, int], None], context: _Context) -> None:
        self._context = context
        self._graph = graph
        self._handle = graph.graphExec
        self._launch = launch

    def __call__(self, stream: int) -> None:
        self._launch(self._handle, stream)

    def __del__(self) -> None:
        with contextlib.suppress(Exception), self._context:  # as a device's stream
            del self._graph


class _Handle:
    """A stream by its handle, in the CUDA stream protocol."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream  # the protocol's version
