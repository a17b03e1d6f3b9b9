"""Variants of the engine: names, devices, and the choice of ``auto``.

All of it is read from the table of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import kernels
from ..errors import UnsupportedError, expected, not_one_of
from .cuda.requirements import MMA_FLOAT16, TENSOR_CORES

#: What kernels may round the operands of products to.
COMPUTES = ("float32", "tf32", "float16", "bfloat16")

#: Where data lives, by device; see docs/reference/variants.md.
DATA_MODES = {
    "cpu": ("resident",),
    "cuda": ("resident", "transfer", "managed", "stream"),
    "openacc": ("resident", "transfer", "managed"),
}


@dataclass(frozen=True)
class Variant:
    """One way of running a network: the table's facts on all kernels of one name.

    Attributes:
        name: as ``--variant`` takes it.
        summary: one line for ``--help`` and docs/reference/variants.md.
        dtypes: by kind of device that it runs on, the data types that it computes in.
        reduction: whether it has a form in which several lanes share one output's sum.
        data_modes: those it runs in, where its device has them.
        layered: whether each layer is a step of its own; else the whole network is one.
    """

    name: str
    summary: str
    dtypes: Mapping[str, tuple[str, ...]]
    reduction: bool
    data_modes: tuple[str, ...]
    layered: bool

    @property
    def devices(self) -> tuple[str, ...]:
        """The kinds of device that it runs on."""
        return tuple(self.dtypes)


def _variants() -> dict[str, Variant]:
    # The table has the fastest first; who reads a list of variants starts with the plainest.
    rows = [row for row in reversed(kernels.TABLE) if row.op == "conv2d"]
    rows += [row for row in kernels.TABLE if row.op == "fused"]
    found = {}
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        layered = own[0].op != "fused"
        found[name] = Variant(
            name,
            own[0].summary,
            {device: row.computes for device in DATA_MODES for row in own if row.device == device},
            any(row.reduction for row in own),
            ("resident", "transfer", "managed", "stream") if layered else ("resident", "stream"),
            layered,
        )
    return found


#: Every variant by its name.
VARIANTS = _variants()

#: Data types that at least one variant takes.
DTYPES = tuple(
    dict.fromkeys(d for row in VARIANTS.values() for types in row.dtypes.values() for d in types)
)


def layered_dtypes(device: Any, rounds: bool) -> tuple[str, ...]:
    """Returns the data types in which a device computes a model's nodes by themselves.

    Args:
        rounds: whether a GPU's nodes may run kernels that round what they multiply.
    """
    if "avx512_bf16" in device.target.features:
        return "float32", "bfloat16"
    if rounds and TENSOR_CORES.met_by(device.target):
        return COMPUTES
    if rounds and MMA_FLOAT16.met_by(device.target):
        return "float32", "float16"
    return ("float32",)


@dataclass(frozen=True)
class Choice:
    """A variant that is going to run, and why when ``auto`` chose it.

    ``auto`` means the fastest kernel for each node; ``variant`` is then that of plain convolutions.
    """

    variant: str
    reduction: bool
    reason: str | None

    @property
    def automatic(self) -> bool:
        """Whether nodes that the variant cannot run may run others."""
        return self.reason is not None

    @property
    def layered(self) -> bool:
        return VARIANTS[self.variant].layered


def choose(
    device: str,
    variant: str,
    reduction: bool | None,
    dtype: str,
    data_mode: str,
    why_not_fused: Callable[[], str | None],
    layered_dtypes: Sequence[str] = ("float32",),
    why_slower: Callable[[], str | None] = lambda: None,
) -> Choice:
    """Returns the choice for ``--variant``, ``--reduction`` (None: not said), ``--dtype``, ``--data-mode``.

    Args:
        device: its kind, ``cpu``, ``cuda`` or ``openacc``.
        why_not_fused: asked at most once: why the network cannot run as one kernel, or None.
        layered_dtypes: data types that the kernels of single nodes can compute in here.
        why_slower: asked at most once, by ``auto`` of float32 where one kernel can run the network: why its
            nodes by themselves are faster, or None.

    Raises:
        InputError: no such variant, data type or data mode.
        UnsupportedError: the device or the variant lacks it.
    """
    if dtype not in DTYPES:
        raise not_one_of("dtype", DTYPES, dtype)
    _check_data_mode(device, data_mode)
    if reduction not in (None, True, False):
        raise expected("reduction", "True, False or None", repr(reduction))
    if variant == "auto":
        return _auto(device, reduction, dtype, data_mode, why_not_fused, layered_dtypes, why_slower)
    if variant not in VARIANTS:
        raise not_one_of("variant", ("auto", *VARIANTS), variant)
    reason = _why_not(VARIANTS[variant], device, reduction, dtype, data_mode)
    if reason is None and variant == "fused" and (fits := why_not_fused()):
        reason = f"variant: fused: {fits}"
    if reason is not None:
        raise UnsupportedError(reason)
    return Choice(variant, bool(reduction), None)


def _auto(
    device: str,
    reduction: bool | None,
    dtype: str,
    data_mode: str,
    why_not_fused: Callable[[], str | None],
    layered_dtypes: Sequence[str],
    why_slower: Callable[[], str | None],
) -> Choice:
    why = _why_not(VARIANTS["fused"], device, reduction, dtype, data_mode) or why_not_fused()
    if why is None and dtype == "float32":  # what it is measured in
        why = why_slower()
    if why is None:
        return Choice("fused", False, "the fastest there is")
    if dtype not in layered_dtypes:
        raise UnsupportedError(f"dtype: {dtype} needs the variant fused, which cannot run: {why}")
    row = next(
        row
        for row in kernels.of("conv2d", device)
        if reduction is None or row.reduction in (None, reduction)
    )
    reduction = bool(row.reduction) if reduction is None else reduction
    return Choice(row.name, reduction, f"the fastest layered variant; not fused: {why}")


def _why_not(
    row: Variant, device: str, reduction: bool | None, dtype: str, data_mode: str
) -> str | None:
    if device not in row.dtypes:
        kinds = " or ".join(row.dtypes)
        return f"variant: {row.name}: expected a device of kind {kinds}, found {device}"
    if dtype not in row.dtypes[device]:
        types = ", ".join(row.dtypes[device])
        return f"dtype: expected one of {types} for {row.name} on {device}, found {dtype}"
    if reduction and not row.reduction:
        return f"reduction: expected a variant that has one, found {row.name}"
    if data_mode not in row.data_modes:
        modes = ", ".join(row.data_modes)
        return f"data_mode: expected one of {modes} for {row.name}, found {data_mode}"
    return None


def _check_data_mode(device: str, data_mode: str) -> None:
    everywhere = sorted({"auto", *(mode for modes in DATA_MODES.values() for mode in modes)})
    if data_mode not in everywhere:
        raise not_one_of("data_mode", everywhere, data_mode)
    known = DATA_MODES[device]
    if data_mode not in known:
        raise UnsupportedError(
            f"data_mode: expected {' or '.join(known)} on the device {device}, found {data_mode}"
        )
