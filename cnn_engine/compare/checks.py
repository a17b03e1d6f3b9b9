"""Checks that results can be compared, and that repeats are runs of the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..errors import expected
from ..measure.result import LayerTime, Result
from .facts import MOST, facts, text, words
from .times import key_of

#: What two runs of the same have in common.
SAME_RUN = (
    "network", "weights", "data set images", "device", "device_name", "variant", "reduction", "dtype",
    "data_mode", "batch", "threads",
)  # fmt: skip

#: What a time in a result can be at most: about 30 years.
LONGEST_S = 1e9


def check_comparable(name: str, result: Result) -> None:
    """Checks that a result has everything that a comparison needs.

    Raises:
        InputError: the check against the reference failed, so that nothing was timed; or a number is out
            of its range. ``name`` is the file that the message names.
    """
    if result.check is not None and not result.check.passed:
        raise expected(
            name,
            "a result that passed the check against the reference",
            f"a failed one (max abs diff {result.check.max_abs_diff:g}); nothing was timed",
        )
    for key in ("name", "source"):
        if not isinstance(result.dataset.get(key), str):
            raise expected(f"{name}: dataset: {key}", "a text", repr(result.dataset.get(key))[:60])
    for what, value, least in _counts(result):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            found = repr(value)
            raise expected(
                f"{name}: {what}",
                f"a whole number from {least} to {MOST}",
                found if len(found) <= 60 else f"{found[:57]}...",
            )
    for what, value in _numbers(result):
        if not math.isnan(value) and not 0 <= value <= LONGEST_S:
            raise expected(f"{name}: {what}", f"seconds from 0 to {LONGEST_S:g}", f"{value:g}")


def _counts(result: Result) -> Iterator[tuple[str, Any, int]]:
    """Yields every number of things, the key that has it, and the least that it can be."""
    yield "dataset: images", result.dataset.get("images"), 0
    for key, least in (("batch", 1), ("threads", 1), ("iterations", 0), ("images_done", 0)):
        yield key, getattr(result, key), least
    if result.timed_pass is not None:
        yield "timed_pass: calls", result.timed_pass.calls, 0
    if result.accuracy is not None:
        yield "accuracy: total", result.accuracy.total, 0
        yield "accuracy: correct", result.accuracy.correct, 0
    for layer in result.layers:
        for key in ("calls", "flops", "bytes"):
            yield f"layer {layer.name}: {key}", getattr(layer, key), 0
    for copy in result.copies:
        for key in ("calls", "bytes"):
            yield f"copy {copy.what}: {key}", getattr(copy, key), 0


def _numbers(result: Result) -> Iterator[tuple[str, float]]:
    """Yields every time that a comparison reads, in seconds, with the key that has it."""
    for key, value in vars(result.phases).items():
        yield f"phases: {key}", math.nan if value is None else value
    if result.latency is not None:
        for value in result.latency.samples_ms:
            yield "latency_samples_ms", value / 1e3
        for key, value in (result.latency.written or {}).items():
            yield f"latency_ms: {key}", value / 1e3
    for layer in result.layers:
        yield f"layer {layer.name}: host_s", layer.host_s
        if layer.device_s is not None:
            yield f"layer {layer.name}: device_s", layer.device_s
    for copy in result.copies:
        yield f"copy {copy.what}: seconds", copy.seconds
    for step in (*result.layers, *result.copies):
        for value in step.samples_s:
            yield (
                f"{'layer' if isinstance(step, LayerTime) else 'copy'} {key_of(step)}: samples_s",
                value,
            )


def check_repeat(names: tuple[str, str], baseline: Result, repeat: Result) -> None:
    """Checks that ``repeat`` is another run of the same as ``baseline``.

    Raises:
        InputError: it is not.
    """
    ours, theirs = facts(baseline), facts(repeat)
    for what in SAME_RUN:
        if ours[what] != theirs[what]:
            raise expected(
                names[1],
                f"another run of {names[0]}, {words(what)} {text(ours[what])}",
                text(theirs[what]),
            )
