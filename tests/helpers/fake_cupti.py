"""A stand-in for cupti-python, and records like CUPTI's."""

from __future__ import annotations

import ctypes
import sys
import types

from cnn_engine.measure.cupti import activity_records as records

ORIGIN = 1_700_000_000_000_000_000  # nanoseconds since 1970, as CUPTI counts

NAMES = {
    (records.RUNTIME, 211): "cudaLaunchKernel_v7000",
    (records.RUNTIME, 41): "cudaMemcpyAsync_v3020",
    (records.RUNTIME, 131): "cudaStreamSynchronize_v3020",
    (records.RUNTIME, 284): "cudaLaunchHostFunc_v10000",
    (records.RUNTIME, 312): "cudaGraphLaunch_ptsz_v10000",
    (records.DRIVER, 307): "cuLaunchKernel",
}


def record(kind: int, start: int, end: int, **fields) -> types.SimpleNamespace:
    """A record of CUPTI's, between two times in nanoseconds after the origin."""
    times = {"start": ORIGIN + start, "end": ORIGIN + end if end else 0}
    return types.SimpleNamespace(kind=kind, **times, **fields)


def kernel(start: int, end: int, correlation: int = 1, **changes) -> types.SimpleNamespace:
    fields = {
        "name": "_Z5emptyv", "stream_id": 7, "correlation_id": correlation, "device_id": 0,
        "grid_x": 4, "grid_y": 2, "grid_z": 1, "block_x": 32, "block_y": 8, "block_z": 1,
        "registers_per_thread": 40, "static_shared_memory": 1024, "dynamic_shared_memory": 512,
    }  # fmt: skip
    return record(records.CONCURRENT_KERNEL, start, end, **(fields | changes))


def api(kind: int, number: int, start: int, end: int, correlation: int = 1, thread: int = 5):
    return record(
        kind, start, end, cbid=number, correlation_id=correlation, thread_id=thread, return_value=0
    )


def copy(start: int, end: int, copy_kind: int, src: int, dst: int, size: int):
    return record(
        records.MEMCPY, start, end, copy_kind=copy_kind, src_kind=src, dst_kind=dst, bytes=size,
        stream_id=7, correlation_id=9, device_id=0,
    )  # fmt: skip


def migration(kind: int, start: int, end: int, value: int, flags: int = 0):
    return record(
        records.UNIFIED_MEMORY_COUNTER, start, end, counter_kind=kind, value=value, flags_=flags
    )


class CuptiError(Exception):
    """As the binding's own errors, known by their module."""


CuptiError.__module__ = "cupti.cupti"


class FakeCupti(types.ModuleType):
    """Stands for the binding: delivers ``pending`` records of enabled kinds on a flush."""

    def __init__(self, refuse: str | None = None, lost: int = 0) -> None:
        super().__init__("cupti.cupti")
        self.refuse, self.lost = refuse, lost
        self.enabled: set[int] = set()
        self.pending: list = []
        self.marks: list[int] = []
        self.now, self.correlation = 0, 0

    def get_timestamp(self) -> int:
        if self.refuse == "everything":
            raise CuptiError("ERROR_INSUFFICIENT_PRIVILEGES (35)")
        return ORIGIN

    def activity_enable(self, kind: int) -> None:
        if self.refuse == kind:
            raise CuptiError("ERROR_NOT_SUPPORTED (27)")
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.discard(kind)

    def activity_register_callbacks(self, requested, completed) -> None:
        size, most = requested()
        assert size > 0
        assert most == 0
        self.completed = completed

    def activity_flush_all(self, flag: int) -> None:
        if self.refuse == "flush":
            raise CuptiError("ERROR_UNKNOWN (999)")
        self.completed([item for item in self.pending if item.kind in self.enabled])
        self.pending = []

    def activity_get_num_dropped_records(self, context: int, stream: int, address: int) -> None:
        ctypes.c_size_t.from_address(address).value = self.lost

    def activity_push_external_correlation_id(self, kind: int, number: int) -> None:
        assert kind == 3
        if self.refuse == "push":
            raise CuptiError("ERROR_INVALID_PARAMETER (1)")
        self.marks.append(number)

    def activity_pop_external_correlation_id(self, kind: int) -> int:
        assert kind == 3
        return self.marks.pop()

    def get_callback_name(self, domain: int, number: int) -> str:
        return NAMES[{2: records.RUNTIME, 1: records.DRIVER}[domain], number]

    class ActivityUnifiedMemoryCounterConfig:
        ptr = 0

        def __init__(self, count: int) -> None:
            self.entries = [types.SimpleNamespace() for _ in range(count)]

        def __getitem__(self, index: int):
            return self.entries[index]

    def activity_configure_unified_memory_counter(self, config: int, count: int) -> None:
        if self.refuse == "managed":
            raise CuptiError("ERROR_UM_PROFILING_NOT_SUPPORTED (28)")

    # ---- what a program would do with CUDA, each call as long as the one before ----

    def launch(self, seconds: float, **changes) -> None:
        """Records a launch and, behind it, its kernel."""
        number = self._call(211, 2e-6)
        end = self.now + round(seconds * 1e9)
        self._emit(kernel(self.now, end, number, **changes))
        self.now = end

    def copy(self, copy_kind: int, size: int, pinned: bool = True) -> None:
        """Records a copy, 1 for h2d and 2 for d2h, at 1 GB/s."""
        number = self._call(41, 1e-6)
        host = 2 if pinned else 1
        positions = {"src": host, "dst": 3} if copy_kind == 1 else {"src": 3, "dst": host}
        found = copy(self.now, self.now + size, copy_kind, **positions, size=size)
        found.correlation_id = number
        self._emit(found)
        self.now += size

    def synchronize(self) -> None:
        self._call(131, 5e-6)

    def _call(self, number: int, seconds: float) -> int:
        self.correlation += 1
        end = self.now + round(seconds * 1e9)
        self._emit(api(records.RUNTIME, number, self.now + 1, end, self.correlation))
        self.now = end
        if self.marks:
            mark = record(
                records.EXTERNAL_CORRELATION, 1, 1, external_kind=3, external_id=self.marks[-1],
                correlation_id=self.correlation,
            )  # fmt: skip
            self._emit(mark)
        return self.correlation

    def _emit(self, item: types.SimpleNamespace) -> None:
        if item.kind in self.enabled:
            self.pending.append(item)


def install(monkeypatch, **options) -> FakeCupti:
    """Puts a stand-in in the place of cupti-python and returns it."""
    package = types.ModuleType("cupti")
    package.cupti = FakeCupti(**options)
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti.cupti", package.cupti)
    return package.cupti
