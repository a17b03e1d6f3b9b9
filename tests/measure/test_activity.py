"""Activity records: their conversion, on records built here and on CUPTI's own, and what a GPU delivers."""

from __future__ import annotations

import ctypes
import sys
import types
from functools import partial
from importlib.util import find_spec
from time import perf_counter

import numpy as np
import pytest
from fake_cupti import NAMES, ORIGIN, api, copy, install, kernel, migration, record

from cnn_engine import devices
from cnn_engine.engine.engine import Engine
from cnn_engine.errors import InputError, UnsupportedError
from cnn_engine.measure.cupti import activity
from cnn_engine.measure.cupti import activity_records as records
from cnn_engine.measure.cupti.activity import ApiCall, Kernel, Trace


def finished(*found) -> Trace:
    trace = Trace(ORIGIN)
    trace.add(found)
    trace.finish(lambda kind, number: NAMES[kind, number])
    return trace


def test_a_kernel_has_its_times_and_shape():
    [found] = finished(kernel(1500, 4000)).kernels
    assert (found.start_s, found.end_s) == pytest.approx((1.5e-6, 4e-6))
    found = found._replace(start_s=0, end_s=1)
    assert found == Kernel("empty", 0, 1, 7, 1, (4, 2, 1), (32, 8, 1), 40, 1536, 0)


@pytest.mark.parametrize(
    ("kind", "src", "dst", "direction", "pinned"),
    [
        (1, 2, 3, "h2d", True),
        (1, 1, 3, "h2d", False),
        (2, 3, 2, "d2h", True),
        (2, 3, 1, "d2h", False),
        (8, 3, 3, "d2d", False),
        (99, 0, 0, "unknown", False),
    ],
)
def test_a_copy_has_its_direction_bytes_and_memory(kind, src, dst, direction, pinned):
    [found] = finished(copy(1, 2001, kind, src, dst, 12345)).copies
    assert (found.direction, found.bytes, found.pinned) == (direction, 12345, pinned)
    assert found.seconds == pytest.approx(2e-6)


def test_copies_between_devices_and_sets():
    peer = record(
        records.MEMCPY_PEER, 1, 11, bytes=64, stream_id=3, correlation_id=2, device_id=1,
        src_kind=3, dst_kind=3, copy_kind=10,
    )  # fmt: skip
    fill = record(records.MEMSET, 20, 30, bytes=32, stream_id=3, correlation_id=4, device_id=1)
    trace = finished(peer, fill)
    assert [(c.direction, c.bytes, c.device) for c in trace.copies] == [("p2p", 64, 1)]
    assert [(s.bytes, s.stream, s.correlation) for s in trace.sets] == [(32, 3, 4)]


def test_what_was_not_finished_counts_as_dropped():
    trace = finished(kernel(1, 0), kernel(5, 9), copy(1, 0, 1, 2, 3, 8))
    assert len(trace.kernels) == 1
    assert trace.copies == []
    assert trace.dropped == 2


def test_api_calls_are_named_without_version_suffixes():
    trace = finished(
        api(records.RUNTIME, 211, 1, 10, 1),
        api(records.RUNTIME, 312, 20, 30, 2),
        api(records.RUNTIME, 284, 40, 50, 3),
        api(records.DRIVER, 307, 60, 70, 4),
    )
    names = ["cudaLaunchKernel", "cudaGraphLaunch", "cudaLaunchHostFunc", "cuLaunchKernel"]
    assert [call.name for call in trace.api] == names
    assert [call.launches for call in trace.api] == [True, True, False, True]
    assert trace.launches == 3


def test_a_driver_call_inside_a_runtime_call_is_counted_once():
    trace = finished(
        api(records.DRIVER, 307, 20, 80, correlation=12),  # inside the next
        api(records.RUNTIME, 211, 10, 90, correlation=11),
        api(records.DRIVER, 307, 30, 70, correlation=13, thread=6),  # another thread's
        api(records.RUNTIME, 211, 90, 95, correlation=14),  # begins as the other ends
        kernel(100, 200, correlation=12),
        record(records.EXTERNAL_CORRELATION, 1, 1, external_kind=3, external_id=42, correlation_id=12),
        record(records.EXTERNAL_CORRELATION, 1, 1, external_kind=2, external_id=43, correlation_id=14),
    )  # fmt: skip
    assert [call.correlation for call in trace.api] == [11, 13, 14]
    assert trace.kernels[0].correlation == 11
    assert trace.marks == {11: 42}
    assert (trace.launches, trace.launches_captured) == (3, 1)


def test_migrations_and_faults():
    trace = finished(
        migration(1, 100, 300, 65536, flags=2),
        migration(2, 400, 600, 4096, flags=4),
        migration(3, 700, 0, 0xDEADBEEF, flags=1),  # the value is an address in the program
        migration(4, 800, 1000, 3, flags=2),
        migration(5, 1100, 0, 2048),
    )
    assert [(m.kind, m.bytes, m.faults, m.cause) for m in trace.managed] == [
        ("h2d", 65536, 0, "coherence"),
        ("d2h", 4096, 0, "eviction"),
        ("cpu page fault", 0, 1, ""),
        ("gpu page fault", 0, 3, ""),
        ("thrashing", 2048, 0, ""),
    ]
    assert [m.seconds for m in trace.managed] == pytest.approx([2e-7, 2e-7, 0, 2e-7, 0])


def test_busy_time_counts_overlapping_kernels_once():
    trace = finished(kernel(1000, 3000), kernel(2000, 4000), kernel(2500, 2600), kernel(9000, 9500))
    assert trace.busy_s() == pytest.approx(3.5e-6)
    assert trace.span_s() == pytest.approx(8.5e-6)
    assert sum(k.seconds for k in trace.kernels) > trace.busy_s()
    assert Trace().busy_s() == Trace().span_s() == 0


def test_records_come_in_the_order_of_time_over_several_recordings():
    trace = finished(kernel(500, 600), kernel(100, 200))
    trace.add([kernel(300, 400)])
    trace.finish(lambda kind, number: NAMES[kind, number])
    assert [k.start_s for k in trace.kernels] == pytest.approx([1e-7, 3e-7, 5e-7])


@pytest.mark.parametrize(
    ("mangled", "plain"),
    [
        ("_ZN10cnn_engine20conv2d_direct_kernelILb1EEEvPKfPf", "cnn_engine::conv2d_direct_kernel<true>"),
        ("_ZN12_GLOBAL__N_14fillEPfi", "(anonymous namespace)::fill"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
        ("_Znonsense", "_Znonsense"),
        ("odd)", "odd)"),
    ],
)  # fmt: skip
def test_kernel_names_are_readable(mangled, plain):
    assert activity.records.readable(mangled) == plain


def test_cupti_own_records_have_the_fields():
    cupti = pytest.importorskip("cupti.cupti", reason="needs cupti-python")
    if find_spec("cupti.buffer_manager"):
        pytest.skip("needs cupti-python 13.2: before it, records exist in CUPTI's buffers alone")

    def newest(stem: str):
        numbers = [name.removeprefix(stem) for name in dir(cupti) if name.startswith(stem)]
        return getattr(cupti, f"{stem}{max((n for n in numbers if n.isdecimal()), key=int)}")()

    def fill(made, **fields):
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    ran = vars(kernel(10, 30, registers_per_thread=255))
    moved = vars(copy(10, 30, 1, 2, 3, 2**33))
    cleared = vars(
        record(records.MEMSET, 10, 30, bytes=7, stream_id=1, correlation_id=4, device_id=0)
    )
    called = vars(api(records.RUNTIME, 211, 1, 9, 5))
    paged = vars(migration(1, 10, 30, 4096, flags=2))
    trace = finished(
        fill(newest("ActivityKernel"), **ran),
        fill(newest("ActivityMemcpy"), **moved),
        fill(newest("ActivityMemset"), **cleared),
        fill(cupti.ActivityAPI(), **called),
        fill(newest("ActivityUnifiedMemoryCounter"), **paged),
    )
    same = finished(*(types.SimpleNamespace(**f) for f in (ran, moved, cleared, called, paged)))
    for name in ("kernels", "copies", "sets", "api", "managed"):
        assert getattr(trace, name) == getattr(same, name) != []
    mark = cupti.ActivityExternalCorrelation()
    assert {"external_kind", "external_id", "correlation_id"} <= set(dir(mark))
    for name, number in (("CONCURRENT_KERNEL", 10), ("MEMCPY2", 22), ("EXTERNAL_CORRELATION", 39)):
        assert cupti.ActivityKind[name] == number


@pytest.fixture
def fake(monkeypatch):
    """Returns a function that puts a stand-in for cupti-python in its place."""
    return partial(install, monkeypatch)


def test_a_recording_fills_the_trace_and_switches_everything_off(fake):
    cupti = fake(lost=3)
    assert activity.unavailable() is None
    with activity.record() as trace:
        trace.push(8)
        cupti.pending += [kernel(10, 20), api(records.RUNTIME, 211, 1, 5), migration(1, 1, 2, 3)]
        trace.pop()
        assert trace.kernels == []
    assert [k.start_s for k in trace.kernels] == pytest.approx([1e-8])
    assert [call.name for call in trace.api] == ["cudaLaunchKernel"]
    assert trace.managed == []  # not asked for
    assert trace.dropped == 3
    assert cupti.enabled == set()
    assert cupti.marks == []
    with pytest.raises(InputError, match="expected a recording under way"):
        trace.push(1)


def test_a_trace_can_go_on_and_recordings_cannot_overlap(fake):
    cupti = fake()
    with activity.record() as trace:
        cupti.pending.append(kernel(10, 20))
        with pytest.raises(InputError, match="one recording at a time"), activity.record():
            pass
    with activity.record(trace) as again:
        cupti.pending.append(kernel(30, 40))
    assert again is trace
    assert len(trace.kernels) == 2


def test_an_interrupted_recording_keeps_its_records(fake):
    cupti = fake()
    trace = Trace(ORIGIN)

    def interrupted() -> None:
        with activity.record(trace):
            cupti.pending.append(kernel(10, 20))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(trace.kernels) == 1
    assert cupti.enabled == set()
    with activity.record():  # nothing is left locked
        pass


def test_managed_memory_is_recorded_where_it_is_asked_for(fake):
    cupti = fake()
    with activity.record(managed_device=0) as trace:
        cupti.pending.append(migration(1, 1, 2, 3))
    assert len(trace.managed) == 1
    assert trace.managed_error is None
    fake(refuse="managed")
    with activity.record(managed_device=0) as trace:
        pass
    assert "UM_PROFILING_NOT_SUPPORTED" in trace.managed_error


def test_refusals_are_one_line(fake):
    fake(refuse="everything")
    reason = activity.unavailable()
    assert "INSUFFICIENT_PRIVILEGES" in reason
    assert "administrators" in reason
    assert "\n" not in reason
    with pytest.raises(UnsupportedError, match="CUPTI refused"), activity.record():
        pass
    cupti = fake(refuse=records.MEMSET)
    with pytest.raises(UnsupportedError, match="NOT_SUPPORTED"), activity.record():
        pass
    assert cupti.enabled == set()
    fake(refuse="flush")
    with pytest.raises(UnsupportedError, match="CUPTI refused"), activity.record():
        pass


def test_a_record_that_cannot_be_read_is_an_error_and_not_lost_in_silence(fake):
    cupti = fake()
    with pytest.raises(AttributeError), activity.record():
        cupti.pending.append(types.SimpleNamespace(kind=records.CONCURRENT_KERNEL))
    with activity.record():
        pass


def test_an_interruption_while_records_are_read_is_not_lost(fake, monkeypatch):
    cupti = fake()

    def interrupted(self, found) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trace, "add", interrupted)
        with pytest.raises(KeyboardInterrupt), activity.record():
            cupti.pending.append(kernel(10, 20))
    with activity.record():
        pass


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupti", None)
    assert "pip install 'cnn-engine[profile]'" in activity.unavailable()


def test_call_names_fall_back_to_numbers(fake):
    cupti = fake()
    with activity.record() as trace:
        cupti.pending.append(api(records.DRIVER, 9999, 1, 5))
    assert [call.name for call in trace.api] == ["driver function 9999"]
    assert isinstance(trace.api[0], ApiCall)


# ---- on a GPU ----


@pytest.fixture
def cuda():
    """The first CUDA device, where its activity can be recorded."""
    if reason := activity.unavailable():
        pytest.skip(reason)
    return devices.select("cuda")


@pytest.mark.gpu
def test_every_launch_of_a_run_is_captured(cuda):
    engine = Engine("cifar10", device="cuda", variant="pad")
    images = np.zeros((20, 3, 32, 32), np.uint8)
    engine.predict(images)
    passes = 5
    start = perf_counter()
    with activity.record() as trace:
        for _ in range(passes):
            engine.predict(images)
    wall_s = perf_counter() - start
    steps = [step for step in engine.plan(20, np.dtype(np.uint8)).steps if step.place == "cuda"]
    kernels = sum(step.kind != "copy" for step in steps)
    assert trace.dropped == 0
    assert trace.launches == trace.launches_captured >= passes * kernels
    assert len(trace.kernels) >= passes * kernels
    assert 0 < trace.busy_s() <= trace.span_s() <= wall_s
    wanted = sorted((s.direction, s.bytes) for s in steps if s.kind == "copy") * passes
    assert sorted((c.direction, c.bytes) for c in trace.copies) == sorted(wanted)
    by_correlation = {call.correlation: call for call in trace.api}
    assert all(by_correlation[k.correlation].launches for k in trace.kernels)
    assert all("emcpy" in by_correlation[c.correlation].name for c in trace.copies)


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("seconds", [0.002, 0.02])
def test_a_known_delay_has_its_length_in_the_record(cuda, seconds):
    cuda.delay(seconds)
    cuda.synchronize()
    with activity.record() as trace:
        cuda.delay(seconds)
        cuda.synchronize()
    [found] = trace.kernels
    assert "delay" in found.name
    assert found.seconds == pytest.approx(seconds, rel=0.05)
    assert trace.busy_s() == pytest.approx(found.seconds)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_copies_carry_their_bytes_and_their_memory(cuda, pinned):
    size = 3 << 20
    host = cuda.empty_pinned((size,), np.uint8) if pinned else np.empty(size, np.uint8)
    host[:] = 1
    buffer = cuda.allocate(size)
    address = host.__array_interface__["data"][0]
    with activity.record() as trace:
        cuda.copy_h2d(buffer.address, address, size)
        cuda.copy_d2h(address, buffer.address, size)
        cuda.synchronize()
    assert [(c.direction, c.bytes, c.pinned) for c in trace.copies] == [
        ("h2d", size, pinned),
        ("d2h", size, pinned),
    ]


@pytest.mark.gpu
def test_marks_lead_from_a_kernel_to_what_launched_it(cuda):
    with activity.record() as trace:
        for number in (7, 8):
            trace.push(number)
            cuda.delay(0.0005)
            trace.pop()
        cuda.delay(0.0005)
        cuda.synchronize()
    assert [trace.marks.get(k.correlation) for k in trace.kernels] == [7, 8, None]


@pytest.mark.gpu
def test_nothing_is_recorded_outside_of_a_recording(cuda):
    with activity.record() as trace:
        pass
    cuda.delay(0.0005)
    cuda.synchronize()
    with activity.record(trace):
        pass
    assert trace.kernels == []


@pytest.mark.gpu
def test_pages_of_managed_memory_are_seen_to_move(cuda):
    size = 4 << 20
    buffer = cuda.allocate_managed(size)
    view = np.frombuffer((ctypes.c_uint8 * size).from_address(buffer.address), np.uint8)
    with activity.record(managed_device=cuda.index) as trace:
        view[:] = 1
        other = cuda.allocate(size)
        cuda._runtime.memcpyAsync(other.address, buffer.address, size, 4, cuda.stream_handle)
        cuda.synchronize()
    if trace.managed_error:
        pytest.skip(trace.managed_error)
    assert {m.kind for m in trace.managed} & {"cpu page fault", "h2d", "gpu page fault"}
