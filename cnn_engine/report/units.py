"""Numbers as the reports print them: four significant digits, units that scale, and no ``0.00``.

Only zero prints as zero, whatever the unit. A value that is not known prints as ``-``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ..errors import printable as printable  # where reports look for it

UNKNOWN = "-"

_DIGITS = 4
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_ENERGIES = ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ"))
# Decimal, so that bytes divided by seconds are the GB/s beside them.
_SIZES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def number(value: float | None) -> str:
    """Returns ``value`` with four significant digits: ``0.1234``, ``12.34``, ``12,345``, ``1.234e-05``."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(float(value))
    if value == 0:
        return "0"
    scientific = f"{value:.{_DIGITS - 1}e}"  # rounds, so that 9.9999 counts as 10.00
    exponent = int(scientific.partition("e")[2])
    if not -2 <= exponent < 12:
        return scientific
    return f"{value:,.{max(_DIGITS - 1 - exponent, 0)}f}"


def _scaled(value: float | None, units: Sequence[tuple[float, str]]) -> str:
    """Returns ``value`` in the largest of ``units`` (largest first) that it reaches."""
    if value is None:
        return UNKNOWN
    plain = next(unit for factor, unit in units if factor == 1)
    if value == 0 or not math.isfinite(value):
        return f"{number(value)} {plain}"
    rounded = abs(float(f"{value:.{_DIGITS - 1}e}"))
    factor, unit = next((row for row in units if rounded >= row[0]), units[-1])
    return f"{number(value / factor)} {unit}"


def seconds(value: float | None) -> str:
    """Returns a time in s, ms, us or ns."""
    return _scaled(value, _TIMES)


def joules(value: float | None) -> str:
    """Returns an energy in kJ, J, mJ or uJ."""
    return _scaled(value, _ENERGIES)


def size(nbytes: int | None) -> str:
    """Returns a number of bytes, exact below 1000, then in kB, MB, ... of 1000."""
    return f"{nbytes} B" if nbytes is not None and abs(nbytes) < 1000 else _scaled(nbytes, _SIZES)


def count(value: int | None) -> str:
    """Returns a whole number, exactly."""
    return UNKNOWN if value is None else f"{value:,}"


def counted(value: int, noun: str, nouns: str | None = None) -> str:
    """Returns ``1 image``, ``2 images``; ``nouns`` is a plural that takes more than an s."""
    return f"{count(value)} {noun if value == 1 else nouns or noun + 's'}"


def percent(fraction: float | None) -> str:
    """Returns ``0.7849`` as ``78.49 %``; ``0 %`` and ``100.00 %`` only where it is exactly so."""
    if fraction is None:
        return UNKNOWN
    if fraction == 0 or not abs(fraction) < 10:
        return f"{number(fraction * 100)} %"
    text = f"{fraction * 100:.2f}"
    if text in ("0.00", "-0.00"):
        return {"0.00": "<0.01 %", "-0.00": ">-0.01 %"}[text]
    if text.lstrip("-") == "100.00" and abs(fraction) != 1:
        beyond = "100.00 %" if abs(fraction) > 1 else "99.99 %"
        return f">{beyond}" if fraction > 0 else f"<-{beyond}"
    return f"{text} %"


def per_second(amount: float, seconds: float | None) -> float | None:
    """Returns ``amount / seconds``; None where there is nothing to divide or nothing to divide by."""
    return amount / seconds if amount and seconds else None


def share(part: float, whole: float | None) -> float | None:
    """Returns ``part / whole``; None where there is no whole."""
    return part / whole if whole else None


def giga_per_second(amount: float, seconds: float | None) -> str:
    """Returns GFLOP/s of FLOPs, or GB/s of bytes, without the unit."""
    rate = per_second(amount, seconds)
    return number(rate and rate / 1e9)


def shortened(name: str, most: int) -> str:
    """Returns a name of at most ``most`` characters: the middle of a longer one is left out.

    Names of layers and kernels differ at their ends.
    """
    if len(name) <= most:
        return name
    tail = (most - 3) // 2
    return f"{name[: most - 3 - tail]}...{name[len(name) - tail :]}"


def shortened_apart(names: Sequence[str], most: int) -> list[str]:
    """Returns the names as :func:`shortened` has them; those that would become equal stay whole."""
    found = [shortened(name, most) for name in names]
    shared = Counter(short for short, _ in set(zip(found, names, strict=True)))
    return [name if shared[short] > 1 else short for short, name in zip(found, names, strict=True)]
