"""From raw samples to CSV files and ``regression.json``, and from these to predictions."""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, expected
from ..io.files import make_folder
from . import files, regression
from .files import Point, RawNetwork, is_number
from .regression import HoldOut, Line, Misfit, Pieces
from .subjects import Mode, Subject, find

REGRESSION, CSV, PLOT = "regression", files.WALL, "transfer"


@dataclass
class Analysis:
    """Analysis of the samples of one network, on one GPU, in one mode.

    Attributes:
        gpu, network: as their folders are named.
        points: by batch size.
        image_bytes: None where the shape of an image is not known.
        line, line_misfit: the single line of the medians; None with too few batch sizes.
        pieces, pieces_misfit: the fit in two pieces.
        device_line, device_pieces: the single line of the medians of device times, and their pieces.
        hold_out: None where none was asked for.
        peak_bytes_per_s: of the bus in this direction; None where it was not measured.
        weights: ``bytes``, ``tensors``, ``first_s``, ``median_s``, ``samples``; None without weights.
        environment: of the last measurement.
        notes: sentences on what is missing.
    """

    gpu: str
    network: str
    mode: Mode
    points: list[Point]
    image_bytes: int | None = None
    line: Line | None = None
    line_misfit: Misfit | None = None
    pieces: Pieces | None = None
    pieces_misfit: Misfit | None = None
    device_line: Line | None = None
    device_pieces: Pieces | None = None
    hold_out: HoldOut | None = None
    peak_bytes_per_s: float | None = None
    weights: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def batches(self) -> np.ndarray:
        """The batch sizes, int64 [points]."""
        return np.array([point.batch_size for point in self.points])

    @property
    def times(self) -> np.ndarray:
        """The median wall times in seconds, float64 [points]."""
        return np.array([point.median_s for point in self.points])

    def bytes_per_s(self) -> np.ndarray | None:
        """Returns the achieved rate of every point; None where the size of an image is not known."""
        if self.image_bytes is None:
            return None
        return self.batches * self.image_bytes / self.times

    def to_dict(self) -> dict[str, Any]:
        """Returns ``regression.json`` without its schema; docs/reference/transfer_files.md has every key."""
        line, pieces = self.line, self.pieces
        times, rates = self.times, self.bytes_per_s()
        return {
            "gpu": self.gpu,
            "network": self.network,
            **asdict(self.mode),
            "image_bytes": self.image_bytes,
            "batch_sizes": len(self.points),
            "samples": sum(point.samples for point in self.points),
            "intercept_s": line.intercept_s,
            "slope_s_per_image": line.slope_s_per_image,
            "r2": line.r2,
            "confidence_intervals": {
                "level": regression.CONFIDENCE,
                "intercept_s": line.intercept_interval_s,
                "slope_s_per_image": line.slope_interval_s_per_image,
            },
            "line_error": asdict(self.line_misfit),
            "break_batch": pieces.break_batch,
            "break_interval": pieces.break_interval,
            "break_p_value": pieces.p_value,
            "neighbour_correlation": pieces.correlation,
            "pieces": [asdict(piece) for piece in pieces.lines],
            "pieces_error": asdict(self.pieces_misfit),
            "hold_out": self.hold_out and asdict(self.hold_out),
            "gb_per_s": {
                "best": None if rates is None else rates.max() / 1e9,
                "of_the_slope": self.slope_rate and self.slope_rate / 1e9,
                "peak": self.peak_bytes_per_s and self.peak_bytes_per_s / 1e9,
            },
            "device": self.device_line
            and {
                key: getattr(self.device_line, key)
                for key in ("points", "intercept_s", "slope_s_per_image", "r2")
            },
            "device_pieces": self.device_pieces and [asdict(p) for p in self.device_pieces.lines],
            "weights": self.weights,
            "residuals": {
                "batch_size": self.batches.tolist(),
                "line_s": (times - line.at(self.batches)).tolist(),
                "pieces_s": (times - pieces.at(self.batches)).tolist(),
            },
            "points": [asdict(point) for point in self.points],
            "environment": self.environment,
            "notes": self.notes,
        }

    @property
    def slope_rate(self) -> float | None:
        """Bytes per second of large batches: of the last piece's slope."""
        slope = self.pieces.lines[-1].slope_s_per_image if self.pieces else 0
        return self.image_bytes / slope if self.image_bytes and slope > 0 else None


def analyse(raw: RawNetwork, held_out: int = 0, seed: int = 0) -> list[Analysis]:
    """Reads all samples of a network and fits every mode that there is.

    Args:
        held_out: batch sizes to hold out; 0: none.
        seed: of the draw.

    Raises:
        InputError: a file is malformed, there are no samples, or too few batch sizes to hold out so many.
    """
    found = raw.points()
    if not found:
        raise expected(str(raw.folder), f"<batch>/{files.WALL}.txt in it", "none")
    about, machine = raw.describe(), files.read_machine(raw.folder.parent)
    subject = _subject(raw.network)
    shape = about["shape"] if about else subject and subject.shape
    analyses = []
    for mode, points in found.items():
        one = Analysis(raw.gpu, raw.network, mode, points)
        one.environment = machine.get("environment")
        if len(machine.get("machines", [])) > 1:
            one.notes.append(f"raw data are of several machines: {machine['machines']}")
        if shape is not None:
            one.image_bytes = Subject(raw.network, tuple(shape)).image_bytes(mode.dtype)
        else:
            one.notes.append(f"GB/s: the shape of an image of {raw.network} is not known")
        peak = machine.get("peak", {}).get(mode.direction)
        if peak is not None:
            one.peak_bytes_per_s = peak["bytes"] / min(peak["seconds"])
        if mode.direction == "h2d":
            one.weights = _weights(raw, mode, about)
        _fit(one, held_out, seed)
        analyses.append(one)
    return analyses


def _subject(name: str) -> Subject | None:
    """Returns the network or bare shape of that name, or None: raw data may be of any network."""
    try:
        return find(name)
    except InputError:
        return None


def _weights(raw: RawNetwork, mode: Mode, about: dict[str, Any] | None) -> dict[str, Any] | None:
    path = raw.weights_path(mode)
    if not path.exists():
        return None
    times = files.read_times(path)
    size = (about or {}).get("weights") or {"bytes": None, "tensors": None}
    return {
        "bytes": size["bytes"], "tensors": size["tensors"],
        "first_s": times[0], "median_s": statistics.median(times), "samples": len(times),
    }  # fmt: skip


def _fit(one: Analysis, held_out: int, seed: int) -> None:
    batches, times = one.batches, one.times
    if held_out:
        one.hold_out = regression.hold_out(batches, times, held_out, seed)
    if len(batches) < regression.FEWEST:
        one.notes.append(
            f"no regression: expected at least {regression.FEWEST} batch sizes, found {len(batches)}"
        )
        return
    one.line = regression.fit_line(batches, times)
    one.line_misfit = regression.misfit(batches, times, one.line.at(batches))
    one.pieces = regression.fit_pieces(batches, times)
    one.pieces_misfit = regression.misfit(batches, times, one.pieces.at(batches))
    if doubt := doubt_of(one.pieces, len(batches)):
        one.notes.append(doubt)
    device = [p for p in one.points if p.device_median_s is not None]
    if len(device) >= regression.FEWEST:
        sizes = np.array([p.batch_size for p in device], float)
        medians = np.array([p.device_median_s for p in device])
        one.device_line = regression.fit_line(sizes, medians)
        one.device_pieces = regression.fit_pieces(sizes, medians)


def doubt_of(pieces: Pieces, sizes: int) -> str:
    """Returns why intervals and the break of a fit of so many batch sizes may not hold; or an empty text."""
    if pieces.correlation is not None:
        return (
            f"times of neighbouring batch sizes are off alike (correlation {pieces.correlation:.2f}): "
            "intervals may be too narrow, and a break may be noise that lasts over several sizes"
        )
    if sizes < regression.ENOUGH:
        return (
            f"{sizes} batch sizes do not show whether times of neighbouring ones are off alike: intervals, "
            f"and a break, hold only if they are not; {regression.ENOUGH} and more show it"
        )
    return ""


def write(one: Analysis, output: Path) -> Path:
    """Writes the CSV file and, where there is a regression, its JSON file; returns their folder.

    Raises:
        InputError: they cannot be written.
    """
    folder = make_folder(output / one.gpu / one.network, "--output")
    files.write_csv(folder / f"{CSV}{one.mode.suffix}.csv", one.points)
    if one.line is not None:
        files.write_document(folder / f"{REGRESSION}{one.mode.suffix}.json", one.to_dict())
    return folder


@dataclass(frozen=True)
class Prediction:
    """The time to move a batch, from a regression that was written before.

    Attributes:
        seconds: of wall time.
        measured: the smallest and the largest batch size that the regression has seen.
    """

    gpu: str
    network: str
    mode: Mode
    batch: int
    seconds: float
    measured: tuple[int, int]

    @property
    def extrapolated(self) -> bool:
        """Whether the batch size is outside the measured range."""
        return not self.measured[0] <= self.batch <= self.measured[1]


def predict(
    output: Path, wanted: list[str] | None, modes: list[Mode], batches: list[int],
    option: str = "--predict",
) -> list[Prediction]:  # fmt: skip
    """Reads the regressions under ``output`` and predicts ``batches``.

    Args:
        wanted: folders of networks; None: all.
        modes: of the files to read; of several, those that exist.
        option: that messages name.

    Raises:
        InputError: there is no such regression, it is malformed, or its time would not be above zero.
    """
    paths = [
        (mode, path)
        for mode in (modes if os.path.isdir(output) else ())
        for path in sorted(output.glob(f"*/*/{REGRESSION}{mode.suffix}.json"))
        if wanted is None or path.parent.name in wanted
    ]
    seen = {path.parent.name for _, path in paths}
    if missing := (set(wanted or ()) - seen or ({"<network>"} if not paths else set())):
        names = " or ".join(f"{REGRESSION}{mode.suffix}.json" for mode in modes)
        raise InputError(
            f"{option}: expected {output / '<gpu>' / min(missing) / names}, found none; measure first "
            "with --batch, or use --organize, or name another mode with --direction, --memory and --dtype"
        )
    paths.sort(key=lambda item: item[1].parent)
    return [each for mode, path in paths for each in _predict(path, mode, batches, option)]


def _predict(path: Path, mode: Mode, batches: list[int], option: str) -> list[Prediction]:
    document = files.read_document(path, "a regression")
    pieces = document.get("pieces")
    keys = ("from_batch", "to_batch", "intercept_s", "slope_s_per_image")
    if not (
        isinstance(pieces, list)
        and len(pieces) in (1, 2)
        and all(isinstance(p, dict) and all(is_number(p.get(key)) for key in keys) for p in pieces)
    ):
        raise expected(f"{path}: pieces", f"one or two lines with {', '.join(keys)}", "others")
    predictions = []
    for batch in batches:
        piece = pieces[-1] if batch >= pieces[-1]["from_batch"] else pieces[0]
        seconds = piece["intercept_s"] + piece["slope_s_per_image"] * batch
        measured = (pieces[0]["from_batch"], pieces[-1]["to_batch"])
        if not seconds > 0:
            raise InputError(
                f"{option}: expected a batch size near those measured ({measured[0]} to {measured[1]}), "
                f"found {batch}, for which {path} gives no time above 0"
            )
        predictions.append(
            Prediction(path.parent.parent.name, path.parent.name, mode, batch, seconds, measured)
        )
    return predictions
