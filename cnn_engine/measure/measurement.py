"""Implements :meth:`cnn_engine.Engine.profile`: a check against the reference, then times."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices import arrays
from ..devices.energy import Energy
from ..errors import InputError, expected
from ..workload import Dataset, Rest, Samples, addresses
from . import accuracy, environment, step_times, timing
from .result import Latency, Result

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..plan.plan import Plan

#: Images that the check against the float64 reference takes: about a second of NumPy.
CHECK_IMAGES = 256


class NoProgress:
    """Shows nothing."""

    def start(self, what: str, images: int) -> None: ...
    def advance(self, images: int) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class Settings:
    """Settings of timed passes; see :meth:`cnn_engine.Engine.profile`.

    Raises:
        InputError: a value is at fault.
    """

    warmup: int = 1
    iterations: int | None = None
    duration_s: float | None = None
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    check: bool = True
    records: bool = True

    def __post_init__(self) -> None:
        for option, value, lowest in (
            ("warmup", self.warmup, 0),
            ("iterations", 1 if self.iterations is None else self.iterations, 1),
        ):
            if not isinstance(value, int) or value < lowest:
                raise expected(option, f"a whole number of at least {lowest}", value)
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise expected("duration_s", "a positive number of seconds", self.duration_s)
        if not all(0 <= p <= 100 for p in self.percentiles):
            raise expected("percentiles", "numbers from 0 to 100", self.percentiles)


def profile(
    engine: Engine,
    images: np.ndarray | Samples | Mapping[str, np.ndarray] | Dataset,
    labels: np.ndarray | None,
    batch: int | None,
    settings: Settings,
    probabilities: np.ndarray | Samples | None,
    progress: Any,
) -> Result:
    """Returns the result of ``engine`` on ``images``; see :meth:`cnn_engine.Engine.profile`."""
    watch = environment.Stopwatch()
    form = engine.form
    given, images, labels, notes = _given(engine, images, labels)
    count = len(images)
    rest = given.rest if given is not None else None
    size = engine.batch_size(batch, count, images.dtype)
    if probabilities is None:
        probabilities = engine.empty_outputs(count, size)
    elif not isinstance(probabilities, Samples):
        shape = (count, *form.rows[form.outputs[0].name])
        if rest is not None and len(probabilities) == count + rest.count:
            shape = (len(probabilities), *shape[1:])  # those of the rest are wanted too
        arrays.view("probabilities", probabilities, shape=shape, writable=True)
    rows = probabilities[:count]
    if engine.dtype == "tf32":
        notes.append(
            "tf32: TF32's 11 significant bits, computed as float16 with a power of two for each layer, "
            "which tensor cores multiply at twice the rate of TF32"
        )
    if engine.device.note:
        notes.append(engine.device.note)

    if batch is None and count and (form.any_batch or count > size):
        notes.append(f"batch: {size:,} of {count:,} images per pass, by rule, since none was named")

    result = Result(
        command=shlex.join(sys.orig_argv),
        started=watch.started,
        environment=environment.describe(engine.device),
        network=engine.network.name,
        weights=engine.weights_source,
        dataset={
            "name": "array" if given is None else given.name,
            "source": "given as arrays" if given is None else given.source,
            "images": count,
        },
        device=engine.device.name,
        device_name=engine.device.model,
        variant=engine.choice.variant,
        variant_reason=engine.choice.reason,
        reduction=engine.choice.reduction,
        dtype=engine.dtype,
        data_mode=engine.data_mode_of(size, images.dtype),
        batch=size,
        threads=engine.threads,
        phases=engine.phases,
        notes=notes,
    )
    result.kernels, words = engine.own_kernels(size, images.dtype)
    result.tuned, more = engine.tuned(size, images.dtype)
    result.notes += [*words, *more]
    load_average = environment.host_load()
    if settings.check:
        result.check = engine.check(images[:CHECK_IMAGES])
        if not result.check.passed:
            result.duration_s = watch.seconds
            return result
    if count:
        plan = engine.plan(result.batch if result.batch < count else count, images.dtype)
        result.memory = engine.memory(plan)
        result.notes += _fallbacks(plan.fallbacks)
        _time(result, engine, images, rows, settings, progress)
        result.notes += _replayed(plan)
    result.environment.update(environment.state(engine.device, load_average))
    if result.images_done:
        _evaluate(result, engine, given, labels, probabilities, count, progress)
    if engine.workload is not None and engine.workload.report_lines is not None:
        result.extra_lines = engine.workload.report_lines(result)
    result.duration_s = watch.seconds
    return result


def _given(
    engine: Engine,
    images: np.ndarray | Samples | Mapping[str, np.ndarray] | Dataset,
    labels: np.ndarray | None,
) -> tuple[Dataset | None, np.ndarray | Samples, np.ndarray | None, list[str]]:
    """Returns the data set where there is one, the images, their labels, and notes for the report.

    Raises:
        InputError: they do not fit the network, or are not in host memory.
    """
    notes = []
    given = images if isinstance(images, Dataset) else None
    if given is not None:
        notes = [given.note] if given.note else []
        images, labels = given.images, given.labels if labels is None else labels
    form = engine.form
    if form.sizes_of is not None:
        wanted = "an engine for one size, which input_shape= says"
        raise expected("engine", wanted, f"{engine.network.name} of any size")
    if isinstance(images, Mapping):
        images = engine.samples(images)
    elif not isinstance(images, Samples):
        found = engine.check_images(images)
        if found.device != arrays.CPU:
            raise InputError("images: expected host memory to profile, found a CUDA device's")
        images = (
            found.array if form.is_images_to_rows else engine.samples({form.inputs[0].name: images})
        )
    count = len(images)
    if labels is not None and not form.is_of_rows:
        notes.append("labels: left out, for the network does not give one row of numbers per image")
        labels = None
    if labels is not None and np.shape(labels) != (count,):
        raise InputError(f"labels: expected shape [{count}], found {list(np.shape(labels))}")
    return given, images, labels, notes


def _evaluate(
    result: Result,
    engine: Engine,
    given: Dataset | None,
    labels: np.ndarray | None,
    probabilities: np.ndarray | Samples,
    count: int,
    progress: Any,
) -> None:
    """Adds the accuracy to a result, and the predictions of files.

    Args:
        count: images in memory; the rest of a data set is predicted here.
    """
    start, done = perf_counter(), result.images_done
    of_classes = engine.form.is_of_rows
    if isinstance(probabilities, Samples) and of_classes:
        (probabilities,) = probabilities.arrays.values()
    if labels is not None:
        result.accuracy = accuracy.count(probabilities[:done], labels[:done])
    if given is not None and given.rest is not None and not result.interrupted:
        more = probabilities[count:] if of_classes else ()
        _finish(result, engine, given.rest, more, progress)
    if labels is not None:
        engine.phases.accuracy_s = perf_counter() - start
    if given is not None and given.files is not None and of_classes:
        result.predictions = accuracy.predictions(
            probabilities[:done],
            None if labels is None else labels[:done],
            given.files,
            given.classes,
        )


def _finish(result: Result, engine: Engine, rest: Rest, rows: np.ndarray, progress: Any) -> None:
    """Predicts the images that are not held in memory, where anybody wants to know."""
    held, every = result.dataset["images"], result.dataset["images"] + rest.count
    result.dataset["total_images"] = every
    note = f"images: times are of {held:,} of {every:,}, which are held in memory"
    if result.accuracy is not None or len(rows):
        begin = perf_counter()
        result.accuracy, done, result.interrupted = accuracy.count_rest(
            engine, rest, result.batch, result.accuracy, rows, progress
        )
        result.dataset["predicted_images"] = held + done
        rate = done / max(perf_counter() - begin, 1e-9)
        note += f"; the others were decoded beside the passes, {rate:.4g} images/s"
        if result.interrupted:
            note += f", and interrupted after {done:,} of them"
    result.notes.append(note)


def _replayed(plan: Plan) -> list[str]:
    """Says how passes were run where a plan's work on the device can be one call."""
    if plan.replays is None:
        return []
    if plan.replays.why_not is not None:
        return [f"passes are run step by step: {plan.replays.why_not}"]
    return ["a pass's work on the device is one CUDA graph; its steps are timed step by step"]


def _fallbacks(found: Mapping[str, str]) -> list[str]:
    """Returns what the report says of nodes that run elsewhere than the rest, or in NumPy."""
    reasons: dict[str, list[str]] = {}
    for name, why in found.items():
        reasons.setdefault(why, []).append(name)
    return [
        f"{len(names)} {'node' if len(names) == 1 else 'nodes'} ({', '.join(names[:4])}"
        f"{' ...' if len(names) > 4 else ''}): {why}"
        for why, names in reasons.items()
    ]


def _time(
    result: Result,
    engine: Engine,
    images: np.ndarray | Samples,
    probabilities: np.ndarray | Samples,
    settings: Settings,
    progress: Any,
) -> None:
    """Fills ``result`` with the times of passes and of steps."""
    batch = result.batch
    for size in {batch, len(images) % batch or batch}:  # memory before time
        engine.plan_at(addresses(images), addresses(probabilities), size, images.dtype)
    progress.start("passes", len(images) * (settings.iterations or 1))
    energy = Energy(engine.device)
    result.notes += energy.notes
    passes = timing.time_passes(
        engine, images, probabilities, batch, warmup=settings.warmup,
        iterations=settings.iterations, duration_s=settings.duration_s, progress=progress.advance,
        energy=energy,
    )  # fmt: skip
    engine.phases.forward_s = passes.forward_s
    result.iterations, result.images_done = passes.iterations, passes.images_done
    result.interrupted, result.stop = passes.interrupted, passes.stop
    if passes.seconds_total > 0:
        result.throughput_images_per_s = passes.images_total / passes.seconds_total
    images_counted = passes.iterations * len(images)
    if passes.joules and images_counted:
        result.energy_j_per_image = {
            source: joules / images_counted for source, joules in passes.joules.items()
        }
    if passes.full_s:
        samples = [seconds * 1e3 for seconds in passes.full_s]
        result.latency = Latency(samples, tuple(float(p) for p in settings.percentiles))
    if not passes.interrupted:
        progress.start("layers", step_times.LAYER_SAMPLES * batch)
        steps = step_times.time_layers(
            engine, images, probabilities, batch, progress.advance, records=settings.records
        )
        result.notes += steps.notes
        if steps.hidden is not None:
            result.notes.append(steps.hidden.describe())
        result.layers, result.copies = steps.layers, steps.copies
        result.whole_pass = steps.whole_pass
        result.timed_pass = steps.timed_pass if steps.timed_pass.calls else None
        result.timeline, result.timeline_total = steps.timeline, steps.timeline_total
        result.interrupted = steps.interrupted
    progress.stop()
