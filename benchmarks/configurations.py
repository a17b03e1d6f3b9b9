"""Configurations of the published tables, measured interleaved, with the setup that repeats share.

A cell is one network in one variant, data mode and batch. Cells are measured A B C A B C, so that a
machine that slows down or speeds up does so for all of them. All times come from ``Engine.profile``.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from cnn_engine import Dataset, Engine
from cnn_engine.errors import CnnEngineError, UnsupportedError
from cnn_engine.measure.result import Result
from cnn_engine.plan.plan import Plan, Step

#: Images that a cell is first checked on, against the float64 reference, and its speed guessed from.
PILOT_IMAGES = 48


class CheckFailed(CnnEngineError):
    """A variant's outputs differ from the reference's; nothing of it is shown."""


class Interrupted(Exception):
    """Ctrl-C: the tables are written from the complete rounds."""


@dataclass
class Cell:
    """One network in one variant, data mode and batch, and what its repeats found.

    Attributes:
        images: the number that the table is about.
        batch: images per pass.
        measured: the images of each repeat; fewer than ``images`` where a time limit says so.
        seconds: instead of one pass over the images, passes are repeated for so long.
        results: one a repeat.
        unsupported: why it cannot run here, or None.
    """

    workload: str
    variant: str
    reduction: bool
    data_mode: str
    images: int
    batch: int
    seconds: float | None = None
    measured: int = 0
    results: list[Result] = field(default_factory=list)
    unsupported: str | None = None

    @property
    def engine_key(self) -> tuple[str, str, bool, str]:
        return self.workload, self.variant, self.reduction, self.data_mode

    @property
    def label(self) -> str:
        """Such as ``pad, reduction``."""
        return self.variant + (", reduction" if self.reduction else "")

    @property
    def scale(self) -> float:
        """What totals of the measured images are multiplied with to be totals of ``images``."""
        return self.images / self.measured

    @property
    def extrapolated(self) -> bool:
        return self.measured < self.images

    def values(self, of: Callable[[Result], float]) -> list[float]:
        return [of(result) for result in self.results]

    def median(self, of: Callable[[Result], float]) -> float:
        return statistics.median(self.values(of))

    def total(self, of: Callable[[Result], float]) -> float:
        """The median of a total, for ``images`` images."""
        return self.median(of) * self.scale

    def spread(self, of: Callable[[Result], float]) -> float:
        """(greatest - least) / median over the repeats."""
        values = self.values(of)
        return (max(values) - min(values)) / statistics.median(values)


# What tables show of a result. Totals are of the images that were measured.


def forward_s(result: Result) -> float:
    """Wall time of one pass over all images."""
    return result.phases.forward_s or 0.0


def layers_s(kind: str | None = None, name: str | None = None) -> Callable[[Result], float]:
    """The time of the layers of one kind, of one name, or of all."""
    return lambda result: sum(
        layer.seconds
        for layer in result.layers
        if kind in (None, layer.kind) and name in (None, layer.name)
    )


def copies_s(result: Result) -> float:
    return sum(copy.seconds for copy in result.copies)


def steps_s(result: Result) -> float:
    """Layers and copies together."""
    return layers_s()(result) + copies_s(result)


def pass_s(result: Result) -> float:
    """The median time of one pass of a full batch."""
    return result.latency.to_dict()["p50"] * 1e-3 if result.latency else math.nan


def copy_share(result: Result) -> float:
    return copies_s(result) / (steps_s(result) or math.nan)


def repeated(dataset: Dataset, images: int) -> Dataset:
    """The first ``images`` images of ``dataset``, which is repeated in order where it has fewer."""
    labels = dataset.labels
    return Dataset(
        dataset.name,
        dataset.source,
        np.resize(dataset.images, (images, *dataset.images.shape[1:])),
        None if labels is None else np.resize(labels, images),
        dataset.note,
    )


class Engines:
    """Engines that are made when first asked for, and kept: one a network, variant and data mode."""

    def __init__(self, device: str, threads: int | None, weights: dict[str, str]) -> None:
        self.device, self.threads, self.weights = device, threads, weights
        self.checked: set[tuple[str, str, bool, str]] = set()
        self._engines: dict[tuple[str, str, bool, str], Engine] = {}

    def fresh(self, cell: Cell) -> Engine:
        """Returns a new engine for ``cell``."""
        return Engine(
            cell.workload,
            weights=self.weights[cell.workload],
            device=self.device,
            variant=cell.variant,
            reduction=cell.reduction,
            data_mode=cell.data_mode,
            threads=self.threads,
        )

    def get(self, cell: Cell) -> Engine:
        """Returns the engine of ``cell``."""
        if cell.engine_key not in self._engines:
            self._engines[cell.engine_key] = self.fresh(cell)
        return self._engines[cell.engine_key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()


def prepare(cell: Cell, engines: Engines, dataset: Dataset, limit_s: float | None) -> None:
    """Checks ``cell`` against the reference, and decides how many images a repeat measures.

    Raises:
        CheckFailed: it is not within the tolerance.
    """
    pilot = repeated(dataset, min(PILOT_IMAGES, cell.images))
    batch = min(cell.batch, len(pilot))
    try:
        engine = engines.get(cell)
        if cell.engine_key not in engines.checked:
            result = engine.profile(pilot, batch=batch, iterations=1)
            if result.interrupted:
                raise Interrupted
            if result.check is None or not result.check.passed:
                raise CheckFailed(
                    f"{cell.workload}, {cell.label}, {cell.data_mode}: expected outputs within "
                    f"{result.check.tolerance:g} of the float64 reference, found "
                    f"{result.check.max_abs_diff:g}"
                )
            engines.checked.add(cell.engine_key)
    except UnsupportedError as error:
        cell.unsupported = str(error)
        return
    cell.measured = cell.images
    if limit_s is not None:
        # Again without the check and warm: this guesses a duration, it is no measurement.
        start = perf_counter()
        engine.profile(pilot, batch=batch, check=False, iterations=1)
        affordable = limit_s / (perf_counter() - start) * len(pilot)
        if affordable < cell.images:
            least = min(cell.images, max(cell.batch, 2 * PILOT_IMAGES))
            whole_batches = int(affordable) // cell.batch * cell.batch
            cell.measured = min(cell.images, max(least, whole_batches))


def measure(
    cells: Sequence[Cell],
    engines: Engines,
    dataset: Dataset,
    repeats: int,
    limit_s: float | None,
    progress: Callable[[str, int], None],
    load: Callable[[int], Dataset] | None = None,
) -> None:
    """Measures every cell ``repeats`` times, in turn. Cells without support keep the reason instead.

    Args:
        limit_s: about how long a cell may take a repeat; None: as long as it does.
        progress: called with what has been done and how many steps remain.
        load: reads so many images; with it, each measurement reads them again and makes a new engine, so
            that its phases are those of a whole program.

    Raises:
        CheckFailed: a variant is not within the tolerance of the reference.
        Interrupted: Ctrl-C; complete rounds are kept.
    """
    left = len(cells) * (repeats + 1)
    for cell in cells:
        prepare(cell, engines, dataset, limit_s)
        left -= 1
        progress(f"check of {cell.workload}, {cell.label}, {cell.data_mode}", left)
    for _ in range(repeats):
        results = []
        for cell in cells:
            if cell.unsupported is None:
                results.append((cell, _measure_once(cell, engines, dataset, load)))
            left -= 1
            progress(f"{cell.workload}, {cell.label}, {cell.data_mode}, batch {cell.batch}", left)
        for cell, result in results:
            cell.results.append(result)


def _measure_once(
    cell: Cell, engines: Engines, dataset: Dataset, load: Callable[[int], Dataset] | None
) -> Result:
    if load is None:
        return _profile(cell, engines.get(cell), repeated(dataset, cell.measured))
    start = perf_counter()
    images = repeated(load(min(cell.measured, len(dataset))), cell.measured)
    load_data_s = perf_counter() - start
    with engines.fresh(cell) as engine:
        engine.phases.load_data_s = load_data_s
        return _profile(cell, engine, images)


def _profile(cell: Cell, engine: Engine, images: Dataset) -> Result:
    result = engine.profile(
        images, batch=cell.batch, warmup=1, iterations=1, duration_s=cell.seconds, check=False
    )
    if result.interrupted:
        raise Interrupted
    result.timeline.clear()
    # The engine goes on using its record of the phases.
    result.phases = dataclasses.replace(result.phases)
    return result


def runner_cost_s() -> float:
    """The engine's own time for a layer: a pass of a thousand steps that do nothing, the best of 50."""
    plan = Plan(1, [Step("empty", "empty", "cpu", int, [])] * 1000, {}, [])
    samples = []
    for _ in range(50):
        start = perf_counter()
        plan.run()
        samples.append(perf_counter() - start)
    return min(samples) / len(plan.steps)


def names_in_order(cells: Iterable[Cell]) -> list[tuple[str, str]]:
    """(name, kind) of every layer of the cells, in the order of the passes."""
    order: list[tuple[str, str]] = []
    for cell in cells:
        after = 0
        for layer in cell.results[0].layers if cell.results else ():
            key = (layer.name, layer.kind)
            if key not in order:
                order.insert(after, key)
            after = order.index(key) + 1
    return order


def to_dict(cell: Cell) -> dict[str, Any]:
    """The cell as JSON: what was asked, every repeat's figures, and the layers of the median repeat."""
    found: dict[str, Any] = {
        "network": cell.workload,
        "variant": cell.variant,
        "reduction": cell.reduction,
        "data_mode": cell.data_mode,
        "batch": cell.batch,
        "images": cell.images,
        "images_measured": cell.measured,
        "extrapolated": cell.extrapolated,
        "unsupported": cell.unsupported,
    }
    if cell.results:
        middle = sorted(cell.results, key=forward_s)[len(cell.results) // 2].to_dict()
        for step in (*middle["layers"], *middle["copies"]):
            del step["samples_s"]  # a record of hundreds of cells; run --json keeps them
        keys = ("device", "threads", "accuracy", "phases", "layers", "copies", "latency_ms")
        found |= {
            "forward_s": cell.values(forward_s),
            "steps_s": cell.values(steps_s),
            "copies_s": cell.values(copies_s),
            "pass_s": cell.values(pass_s),
            "median_repeat": {key: middle[key] for key in (*keys, "throughput_images_per_s")},
        }
    return found
