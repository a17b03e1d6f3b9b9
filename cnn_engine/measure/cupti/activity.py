"""Records work of the GPU and calls of the CUDA API by CUPTI's activity records (extra ``profile``).

:func:`record` sees everything in this process, whichever library launched it. What it returns is in
:mod:`cnn_engine.measure.cupti.activity_records`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ...errors import InputError, UnsupportedError
from . import activity_records as records
from .activity_records import ApiCall, Copy, Kernel, Migration, Set, Trace

__all__ = ["ApiCall", "Copy", "Kernel", "Migration", "Set", "Trace", "record", "unavailable"]

BUFFER_BYTES = 16 * 2**20  # some 100,000 records: few are handed over while passes are timed
FORCED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED
RUNTIME_API, DRIVER_API = 2, 1  # of CUpti_CallbackDomain
SINGLE_DEVICE = 1  # of CUpti_ActivityUnifiedMemoryCounterScope

_lock = threading.Lock()
_trace: Trace | None = None  # that is being recorded
_failures: list[BaseException] = []  # of the callback, which must not raise into CUPTI


def unavailable() -> str | None:
    """Returns None where records can be had; else one line that says why not.

    Nothing stays switched on: it is only tried.
    """
    if _trace is not None:  # being recorded: to try would switch it off
        return None
    try:
        from cupti import cupti
    except ImportError as error:
        return (
            f"activity records: expected the package cupti-python, found none ({error}); "
            "pip install 'cnn-engine[profile]'"
        )
    except Exception as error:  # a driver or library of another version
        return f"activity records: cupti-python cannot be used: {_reason(error)}"
    try:
        cupti.get_timestamp()
        cupti.activity_enable(records.CONCURRENT_KERNEL)
        cupti.activity_disable(records.CONCURRENT_KERNEL)
    except Exception as error:  # no driver, no libcupti, no permission, another profiler
        return _refusal(error)
    return None


def _refusal(error: BaseException) -> str:
    return f"activity records: CUPTI refused: {_reason(error)}"


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if "PRIVILEGES" in text:
        text += "; the driver keeps them to administrators (NVreg_RestrictProfilingToAdminUsers)"
    if "MULTIPLE_SUBSCRIBERS" in text:
        text += "; another profiler is attached to this process"
    return text


@contextmanager
def record(trace: Trace | None = None, *, managed_device: int | None = None) -> Iterator[Trace]:
    """Records everything that the block does with CUDA, in all threads of this process.

    The trace is filled when the block ends. Wait in the block for the work that it queues: what still runs at
    its end is not recorded and counts as dropped.

    Args:
        trace: a trace to go on with, on the same clock; None: a new one.
        managed_device: a CUDA device whose migrations and faults of managed memory are recorded as well.

    Raises:
        UnsupportedError: records cannot be had; see :func:`unavailable`.
        InputError: another recording is under way.
    """
    if reason := unavailable():
        raise UnsupportedError(reason)
    from cupti import cupti

    if not _lock.acquire(blocking=False):
        raise InputError("activity records: expected one recording at a time, found another")
    global _trace
    try:
        trace = _trace = trace or Trace(cupti.get_timestamp())
        cupti.activity_register_callbacks(_buffer_requested, _buffer_completed)
        with _enabled(cupti, managed_device):
            trace.push = partial(cupti.activity_push_external_correlation_id, records.CUSTOM_0)
            trace.pop = partial(cupti.activity_pop_external_correlation_id, records.CUSTOM_0)
            try:
                yield trace
            finally:
                trace.push = trace.pop = records.not_recording
                cupti.activity_flush_all(FORCED)
                trace.finish(partial(_api_name, cupti))
                trace.dropped += _lost(cupti)
        if _failures:
            raise _failures[0]
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "cupti":
            raise UnsupportedError(_refusal(error)) from error
        raise
    finally:
        _trace = None
        _failures.clear()
        _lock.release()


@contextmanager
def _enabled(cupti: Any, managed_device: int | None) -> Iterator[None]:
    """Switches the records on, and off again."""
    on = []
    try:
        for kind in records.RECORDED:
            cupti.activity_enable(kind)
            on.append(kind)
        if managed_device is not None:
            try:
                _configure_managed(cupti, managed_device)
                cupti.activity_enable(records.UNIFIED_MEMORY_COUNTER)
                on.append(records.UNIFIED_MEMORY_COUNTER)
            except Exception as error:  # not on this GPU or in this container: the rest counts
                _trace.managed_error = f"managed memory: CUPTI refused: {_reason(error)}"
        yield
    finally:
        for kind in on:
            with suppress(Exception):  # what cannot be switched off does no harm
                cupti.activity_disable(kind)


def _configure_managed(cupti: Any, device: int) -> None:
    config = cupti.ActivityUnifiedMemoryCounterConfig(len(records.MIGRATIONS))
    for index, kind in enumerate(records.MIGRATIONS):
        entry = config[index]
        entry.kind, entry.scope, entry.device_id, entry.enable = kind, SINGLE_DEVICE, device, 1
    cupti.activity_configure_unified_memory_counter(config.ptr, len(records.MIGRATIONS))


def _buffer_requested() -> tuple[int, int]:
    return BUFFER_BYTES, 0  # as many records as fit


def _buffer_completed(delivered: list[Any]) -> None:
    # The records lie in CUPTI's buffer, which is reused: they are copied here.
    try:
        if _trace is not None:
            _trace.add(delivered)
    except BaseException as error:  # Ctrl-C too: in CUPTI it would be lost
        _failures.append(error)


def _api_name(cupti: Any, kind: int, number: int) -> str:
    domain = RUNTIME_API if kind == records.RUNTIME else DRIVER_API
    try:
        return cupti.get_callback_name(domain, number)
    except Exception:  # newer than the library
        return f"{'runtime' if kind == records.RUNTIME else 'driver'} function {number}"


def _lost(cupti: Any) -> int:
    """Returns how many records CUPTI had no room for since it was last asked."""
    lost = ctypes.c_size_t(0)
    try:
        cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(lost))
    except Exception:  # the queue does not exist: nothing was recorded
        return 0
    return lost.value
