"""Facts that describe a run and its machine, and how two results differ in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..measure.result import Result
from ..report import units

#: What of ``cpu_state`` and ``gpu_state`` is a setting, not a reading of the moment.
SETTINGS = ("governor", "turbo", "on_battery", "max_sm_clock_mhz", "power_limit_w")
CLOCKS = ("sm_clock_mhz", "memory_clock_mhz")
CLOCKS_WITHIN = 0.02

#: What a count in a result can be at most: what 64 bits hold.
MOST = 2**63 - 1


def differences(baseline: Result, other: Result) -> Iterator[tuple[str, str, str]]:
    """Yields the facts that differ between two results."""
    ours, theirs = facts(baseline), facts(other)
    for what in [*ours, *(key for key in theirs if key not in ours)]:
        if what not in ours or what not in theirs:
            continue  # a file from before it was recorded
        first, second = ours[what], theirs[what]
        if what in CLOCKS and first and second:
            if abs(first - second) > CLOCKS_WITHIN * max(first, second):
                yield words(what), units.number(first), units.number(second)
        elif first != second:
            yield words(what), text(first), text(second)


def facts(result: Result) -> dict[str, Any]:
    """Returns the facts that describe ``result``, the most important first."""
    found = {key: getattr(result, key) for key in ("network", "weights")}
    found |= {f"data set {key}": result.dataset[key] for key in ("name", "source", "images")}
    for key in ("device", "device_name", "variant", "reduction", "dtype", "data_mode", "batch",
                "threads"):  # fmt: skip
        found[key] = getattr(result, key)
    if result.accuracy is not None:
        found["accuracy"] = units.percent(result.accuracy.top1)
    for key, value in result.environment.items():
        if key in ("cpu_state", "gpu_state"):
            known = value if isinstance(value, dict) else {}
            for name in SETTINGS:
                if known.get(name) is not None:
                    found[name] = known[name]
            for name in CLOCKS:
                if isinstance(known.get(name), (int, float)) and abs(known[name]) < MOST:
                    found[name] = known[name]
        elif isinstance(value, dict):
            found |= value
        elif key != "warnings":
            found[key] = value
    return found


def words(key: str) -> str:
    """Returns the name of a fact as a message has it."""
    return units.printable(key).replace("_", " ")


def text(value: Any) -> str:
    """Returns the value of a fact as a message has it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return units.printable(value)
