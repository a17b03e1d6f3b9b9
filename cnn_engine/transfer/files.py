"""Raw samples on disk: where they are, how they are read back, and how they grow.

::

    raw_data/<gpu>/transfer/machine.json                               environment, peak bandwidth
    raw_data/<gpu>/transfer/<network>/network.json                     shape of an image, size of the weights
    raw_data/<gpu>/transfer/<network>/model_transfer_time.txt          the weights
    raw_data/<gpu>/transfer/<network>/<batch>/data_transfer_time.txt   a batch: wall time
    raw_data/<gpu>/transfer/<network>/<batch>/device_transfer_time.txt a batch: what the GPU copied for

A ``.txt`` file has one time in seconds a line, in the order of measurement. These names are of the default
mode (host to device, pageable memory, uint8 images); other modes put a suffix before ``.txt``, such as
``_d2h_pinned`` or ``_h2d_pageable_float32``.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, expected
from ..io.files import (
    MOST_JSON_BYTES,
    atomic_write,
    check_writable,
    describe_os_error,
    make_folder,
    parse_json,
    read_bytes,
    status,
)  # fmt: skip
from ..report.json import finite
from ..report.units import printable
from .subjects import LARGEST_BATCH, MODES, Mode

SCHEMA = 1

RAW, SECTION = "raw_data", "transfer"
MACHINE, NETWORK = "machine.json", "network.json"
WALL, DEVICE, WEIGHTS = "data_transfer_time", "device_transfer_time", "model_transfer_time"
#: Column of the CSV of a mode -> its meaning.
COLUMNS = {
    "batch_size": "images that are moved at once",
    "mean_s": "mean seconds of the samples",
    "median_s": "median seconds of the samples",
    "std_s": "standard deviation of the samples in seconds; empty for one sample",
    "samples": "how many samples there are",
}

MOST_SAMPLES = 10_000_000  # of a file
LONGEST_S = 1e6
LARGEST_COUNT = 2**60  # of bytes, or of a dimension


@dataclass
class Samples:
    """Times of one batch size in one mode, in seconds, in the order of measurement.

    Attributes:
        wall: host time from the call to the completed copy.
        device: what the GPU copied for, of copies of their own; often fewer, or none.
    """

    wall: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Point:
    """The samples of one batch size, summed up. ``std_s`` is None for one sample."""

    batch_size: int
    mean_s: float
    median_s: float
    std_s: float | None
    samples: int
    device_median_s: float | None = None

    @classmethod
    def of(cls, batch: int, samples: Samples) -> Point:
        """Returns the mean, median and standard deviation (of a sample) of the wall times."""
        wall = samples.wall
        return cls(
            batch_size=batch,
            mean_s=statistics.fmean(wall),
            median_s=statistics.median(wall),
            std_s=float(np.std(wall, ddof=1)) if len(wall) > 1 else None,
            samples=len(wall),
            device_median_s=statistics.median(samples.device) if samples.device else None,
        )


class RawNetwork:
    """The raw samples of one network on one GPU: ``raw_data/<gpu>/transfer/<network>``.

    Attributes:
        folder: of the network; it need not exist.
        gpu, network: as the folders are named.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = folder.name
        self.gpu = folder.parent.parent.name
        self._held: dict[tuple[Mode, int], Samples] = {}
        self._changed: set[tuple[Mode, int]] = set()

    def samples(self, mode: Mode, batch: int) -> Samples:
        """Returns the samples on disk, none where there are none, with those added since.

        Raises:
            InputError: a file is malformed; names file and line.
        """
        key = mode, batch
        if key not in self._held:
            wall, device = self._paths(mode, batch)
            self._held[key] = Samples(
                read_times(wall) if wall.exists() else [],
                read_times(device) if device.exists() else [],
            )
        return self._held[key]

    def add(self, mode: Mode, batch: int, new: Samples) -> None:
        """Keeps more samples, to be written by :meth:`flush`."""
        held = self.samples(mode, batch)
        held.wall += new.wall
        held.device += new.device
        self._changed.add((mode, batch))

    def forget(self, mode: Mode, batch: int) -> None:
        """Drops the samples on disk; their files stay until new ones are written."""
        self._held[mode, batch] = Samples()

    def flush(self) -> None:
        """Writes the added samples, each file whole or not at all.

        Raises:
            InputError: a file cannot be written.
        """
        for key in sorted(self._changed):
            wall, device = self._paths(*key)
            make_folder(wall.parent, "--output")
            samples = self._held[key]
            if samples.wall:
                write_times(wall, samples.wall)
            if samples.device:
                write_times(device, samples.device)
            self._changed.discard(key)

    def weights_path(self, mode: Mode) -> Path:
        """Path of the weights' times; they are float32 and go to the device only."""
        suffix = "" if mode.memory == "pageable" else f"_{mode.memory}"
        return self.folder / f"{WEIGHTS}{suffix}.txt"

    def describe(self) -> dict[str, Any] | None:
        """Returns the content of ``network.json``: ``shape`` and ``weights`` {bytes, tensors}, or None.

        Raises:
            InputError: it is malformed.
        """
        path = self.folder / NETWORK
        if not os.path.lexists(path):
            return None
        found = read_document(path, "a network's shape and weights")
        shape, weights = found.get("shape"), found.get("weights")
        if not (isinstance(shape, list) and len(shape) == 3 and all(map(_is_count, shape))):
            raise expected(f"{path}: shape", "three whole numbers above 0", shape)
        if weights is not None and not (
            isinstance(weights, dict)
            and all(_is_count(weights.get(k)) for k in ("bytes", "tensors"))
        ):
            raise expected(f"{path}: weights", "bytes and tensors, or null", weights)
        return found

    def points(self) -> dict[Mode, list[Point]]:
        """Returns every mode that has samples, and its batch sizes in order.

        Raises:
            InputError: a folder is not named by a batch size, or a file is malformed.
        """
        found: dict[Mode, list[Point]] = {}
        for batch, folder in sorted(self._batches()):
            for file in folders_and_files(folder):
                if file.name.startswith(WALL) and not file.is_dir():
                    mode = _mode(file)
                    samples = self.samples(mode, batch)
                    if samples.wall:  # not where they were dropped
                        found.setdefault(mode, []).append(Point.of(batch, samples))
        return dict(sorted(found.items(), key=lambda item: list(MODES.values()).index(item[0])))

    def _batches(self) -> Iterator[tuple[int, Path]]:
        for folder in folders_and_files(self.folder):
            name = folder.name
            if not folder.is_dir():
                continue
            number = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else 0
            if str(number) != name or not 1 <= number <= LARGEST_BATCH:
                raise expected(
                    str(folder), f"a folder named by a batch size, 1 to {LARGEST_BATCH}", repr(name)
                )
            yield number, folder

    def _paths(self, mode: Mode, batch: int) -> tuple[Path, Path]:
        folder = self.folder / str(batch)
        return folder / f"{WALL}{mode.suffix}.txt", folder / f"{DEVICE}{mode.suffix}.txt"


def networks(raw: Path, wanted: set[str] | None = None) -> list[RawNetwork]:
    """Returns the networks in the folder ``raw``, or in its ``raw_data``, as ``<gpu>/transfer/<network>``.

    Args:
        wanted: names of folders; None: all.

    Raises:
        InputError: there is none, or one that is wanted is missing.
    """
    if not os.path.isdir(raw):
        status(raw)
        raise InputError(f"{raw}: expected a folder, found a file")
    found = _networks(raw)
    if not found and (raw / RAW).is_dir():
        found = _networks(raw / RAW)
    if not found:
        raise expected(str(raw), f"<gpu>/{SECTION}/<network>/<batch>/{WALL}.txt in it", "none")
    names = {each.network for each in found}
    if missing := (wanted or set()) - names:
        raise expected("--network", f"one of {', '.join(sorted(names))} in {raw}", min(missing))
    return [each for each in found if wanted is None or each.network in wanted]


def _networks(raw: Path) -> list[RawNetwork]:
    return [
        RawNetwork(network)
        for gpu in folders_and_files(raw)
        if (gpu / SECTION).is_dir()
        for network in folders_and_files(gpu / SECTION)
        if network.is_dir()
    ]


def folders_and_files(folder: Path) -> list[Path]:
    """Returns the names in ``folder``, sorted, without hidden ones.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {describe_os_error(error)}") from error


def read_times(path: Path) -> list[float]:
    """Returns the times in a raw file, one in seconds a line.

    Raises:
        InputError: the file cannot be read, has no line, or a line is no time; names the line.
    """
    times: list[float] = []
    if path.exists() and not path.is_file():  # a pipe would wait for ever
        raise InputError(f"{path}: expected a file, found a folder or a special file")
    try:
        with path.open(encoding="ascii", errors="backslashreplace") as file:
            # A line is read in part where it is too long to be a number.
            while line := file.readline(100):
                text = line.strip()
                try:
                    value = float(text) if "_" not in text else math.nan
                except ValueError:
                    value = math.nan
                if not 0 < value <= LONGEST_S:
                    raise expected(
                        f"{path}, line {len(times) + 1}",
                        f"a time in seconds above 0, up to {LONGEST_S:g}",
                        repr(text[:40]) if text else "an empty line",
                    )
                times.append(value)
                if len(times) > MOST_SAMPLES:
                    raise expected(str(path), f"at most {MOST_SAMPLES} times", "more")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {describe_os_error(error)}") from error
    if not times:
        raise expected(str(path), "one time in seconds a line", "an empty file")
    return times


def write_times(path: Path, times: list[float]) -> None:
    """Writes one time in seconds per line, with all digits.

    Raises:
        InputError: the file cannot be written.
    """
    with atomic_write(path) as file:
        file.writelines(f"{np.format_float_positional(time)}\n" for time in times)


def write_csv(path: Path, points: list[Point]) -> None:
    """Writes the columns :data:`COLUMNS`, a line per batch size; ``std_s`` of one sample is empty."""
    with atomic_write(path) as file:
        file.write(",".join(COLUMNS) + "\n")
        for point in points:
            values = (getattr(point, column) for column in COLUMNS)
            file.write(",".join("" if value is None else repr(value) for value in values) + "\n")


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Writes ``document`` as JSON, with its schema."""
    with atomic_write(path) as file:
        json.dump({"schema": SCHEMA, **finite(document)}, file, indent=1, allow_nan=False)
        file.write("\n")


def read_document(path: Path, what: str) -> dict[str, Any]:
    """Returns the JSON object in a file that :func:`write_document` wrote.

    Raises:
        InputError: it cannot be read, is no JSON object, or is of another schema.
    """
    document = parse_json(read_bytes(path, MOST_JSON_BYTES), str(path), f"{what} as JSON")
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise expected(f"{path}: schema", SCHEMA, found)
    return document


def read_machine(folder: Path) -> dict[str, Any]:
    """Returns ``machine.json`` of ``raw_data/<gpu>/transfer``; empty where there is none.

    Raises:
        InputError: it is malformed.
    """
    path = folder / MACHINE
    if not os.path.lexists(path):
        return {}
    found = read_document(path, "a machine's environment and peak bandwidth")
    peak = found.get("peak", {})
    if not isinstance(peak, dict) or not isinstance(found.get("environment", {}), dict):
        raise expected(str(path), "the objects environment and peak", "something else")
    if not isinstance(found.get("machines", []), list):
        raise expected(f"{path}: machines", "a list", found["machines"])
    for direction, value in peak.items():
        if not isinstance(value, dict) or not (
            _is_count(value.get("bytes")) and _are_times(value.get("seconds"))
        ):
            raise expected(f"{path}: peak {printable(direction)}", "bytes and seconds", value)
    return found


def machine_document(
    before: dict[str, Any], described: dict[str, Any], peak: dict[str, Any]
) -> dict[str, Any]:
    """Returns ``machine.json`` for work on the machine ``described``, given its content ``before``."""
    this = [described[key] for key in ("cpu", "gpu", "driver")]
    machines = [machine for machine in before.get("machines", []) if machine != this]
    return {"environment": described, "peak": peak, "machines": [*machines, this]}


def prepare(path: Path) -> Path:
    """Creates the folder ``path`` and sees that files can be written there.

    Raises:
        InputError: they cannot.
    """
    check_writable(make_folder(path, "--output") / MACHINE, "--output")
    return path


def _mode(path: Path) -> Mode:
    suffix = path.name.removeprefix(WALL).removesuffix(".txt")
    if suffix not in MODES or path.suffix != ".txt":
        known = ", ".join(f"{WALL}{suffix}.txt" for suffix in MODES)
        raise expected(str(path), f"one of {known}", path.name)
    return MODES[suffix]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_COUNT


def _are_times(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(is_number(v) and 0 < v <= LONGEST_S for v in values)
    )


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number, as JSON has them."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max  # an integer may be larger than any float
