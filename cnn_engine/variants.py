"""The variants of the engine: which there are, where each runs, and what ``auto`` picks.

A new variant is one row here, and a case where :mod:`cnn_engine.plan` turns layers into steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UnsupportedError, expected
from .network import Network

#: Data types that at least one variant takes.
DTYPES = ("float32",)

#: Where data lives, by device; see DESIGN and the README.
DATA_MODES = {"cpu": ("resident",), "cuda": ("resident", "transfer", "managed")}


@dataclass(frozen=True)
class Variant:
    """One way of running a network.

    Attributes:
        name: as ``--variant`` takes it.
        summary: one line for ``--help`` and the README.
        devices: the kinds of device that it runs on.
        dtypes: the data types that it computes in.
    """

    name: str
    summary: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32",)


VARIANTS = {
    row.name: row
    for row in (
        Variant("if", "tests the image's bounds inside the innermost loop"),
        Variant("pad", "first writes a zero-padded copy of its input, then runs branch-free"),
    )
}

#: What ``auto`` takes on each kind of device, and why: measured, see the README's results.
FASTEST = {
    "cpu": ("pad", True, "the fastest layered variant on CPUs"),
    "cuda": ("pad", False, "the fastest layered variant on GPUs"),
}


@dataclass(frozen=True)
class Choice:
    """A variant that is going to run, and why when ``auto`` chose it."""

    variant: str
    reduction: bool
    reason: str | None


def choose(
    network: Network, device: str, variant: str, reduction: bool | None, dtype: str
) -> Choice:
    """Returns what runs for ``--variant``, ``--reduction`` (None: not said) and ``--dtype``.

    Raises:
        InputError: no such variant or data type.
        UnsupportedError: the device lacks it.
    """
    if dtype not in DTYPES:
        raise expected("--dtype", f"one of {', '.join(DTYPES)}", repr(dtype))
    if variant == "auto":
        name, fastest_reduction, reason = FASTEST[device]
        return Choice(name, fastest_reduction if reduction is None else reduction, reason)
    if variant not in VARIANTS:
        raise expected("--variant", f"auto or one of {', '.join(VARIANTS)}", repr(variant))
    row = VARIANTS[variant]
    if device not in row.devices:
        raise UnsupportedError(
            f"--variant: {variant}: expected a device of kind {' or '.join(row.devices)}, "
            f"found {device}"
        )
    if dtype not in row.dtypes:
        raise UnsupportedError(
            f"--dtype: expected one of {', '.join(row.dtypes)} for the variant {variant}, "
            f"found {dtype}"
        )
    return Choice(variant, bool(reduction), None)


def check_data_mode(device: str, data_mode: str) -> None:
    """Raises an error unless the device knows ``data_mode``."""
    known = DATA_MODES[device]
    everywhere = sorted({mode for modes in DATA_MODES.values() for mode in modes})
    if data_mode not in everywhere:
        raise expected("--data-mode", f"one of {', '.join(everywhere)}", repr(data_mode))
    if data_mode not in known:
        raise UnsupportedError(
            f"--data-mode: expected {' or '.join(known)} on the device {device}, found {data_mode}"
        )
