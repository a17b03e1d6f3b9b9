"""Results as objects; :meth:`Result.to_dict` is the JSON document (schema 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from ..engine.check import Check
from ..engine.phases import Phases
from ..errors import InputError, expected
from .profile_tables import Profile
from .reading import brief, read

#: Of the JSON document. Keys may be added to a schema; one that is renamed or means something else makes a
#: new one.
SCHEMA = 1

#: Raw samples of one quantity that the JSON document keeps; more are thinned evenly, in order.
MOST_SAMPLES = 10_000


def thinned(samples: Sequence[float]) -> list[float]:
    """Returns at most :data:`MOST_SAMPLES` of ``samples``: every k-th, in order."""
    return list(samples[:: -(-len(samples) // MOST_SAMPLES) or 1])


@dataclass
class LayerPart:
    """Time of a part of a fused network, within its one kernel or call.

    Attributes:
        name: its layers' names, joined by ``+``; ``kind``: their kinds, likewise, each once.
        layers: the names one by one.
        seconds: its share of the fused step's; those of all parts add up to the step.
        share: of the fused step.
        flops: of all calls.
    """

    name: str
    kind: str
    layers: list[str]
    seconds: float
    share: float
    flops: int = 0


@dataclass
class LayerTime:
    """The time of one layer over ``calls`` calls: that of a usual call, times the calls.

    Attributes:
        name, kind: such as ``conv1``, ``conv``. The padded copy of the variant ``pad`` is a layer of its
            own, of kind ``pad``.
        place: ``cpu`` or ``cuda``: where it ran.
        host_s: seconds that the call took on the host: all of the work on the CPU, the launch on CUDA.
        device_s: seconds that its kernels ran on the device; None on the CPU.
        flops, bytes: of all calls; multiply-adds count two, bytes count each tensor once.
        samples_s: ``seconds`` of each sampled pass over a full batch, in order.
        inside: of a fused network, the parts of its one step; else empty.
        kernel: the kernel that ran it; ``numpy`` where there is none of ours yet; empty where not known.
    """

    name: str
    kind: str
    place: str
    calls: int = 0
    host_s: float = 0.0
    device_s: float | None = None
    flops: int = 0
    bytes: int = 0
    samples_s: list[float] = field(default_factory=list, repr=False)
    inside: list[LayerPart] = field(default_factory=list)
    kernel: str = ""

    @property
    def seconds(self) -> float:
        """The time of the work itself: the device's where there is one, else the host's."""
        return self.host_s if self.device_s is None else self.device_s


@dataclass
class CopyTime:
    """The time of copies of one thing in one direction, over ``calls`` calls.

    Attributes:
        what: such as ``images``, ``conv1 input``, ``weights``.
        direction: ``h2d`` or ``d2h``; ``h2h`` for staging on the CPU.
        seconds: that the device copied; on the CPU, of the call.
        pageable: whether the host's memory is not page-locked, so that the driver stages it (which is no
            part of ``seconds``); None where that is not known.
        samples_s: as :class:`LayerTime` has them.
    """

    what: str
    direction: str
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    samples_s: list[float] = field(default_factory=list, repr=False)
    pageable: bool | None = None


@dataclass
class TimedPass:
    """Whole-pass time of the run that times each layer, over all images once.

    Attributes:
        calls: passes.
        host_s: seconds of the monotonic clock, with a reading after each step.
        device_s: seconds from the beginning of the first step on the device to the end of the last, in the
            passes that measure these; None without a device.
    """

    calls: int = 0
    host_s: float = 0.0
    device_s: float | None = None


@dataclass
class Between:
    """Time of a pass between its steps.

    Attributes:
        name: ``launch``: in calls that queue work, while the device had none; ``staging``: likewise in copies
            of pageable memory, which the driver moves through page-locked memory of its own; ``waiting``:
            likewise in waits for the device; ``host``: before the first step and after the last; ``overlap``:
            below zero, what is counted twice where steps run at the same time on purpose.
        seconds: of all passes.
    """

    name: str
    seconds: float


@dataclass
class WholePass:
    """The pass that shares refer to, and its time between layers and copies.

    Passes of three kinds take turns: plain ones, ones with a reading of the host's clock after each step, and
    ones that measure the work on the device. Seconds are of all passes over all images once, each as long as
    a usual one.

    Attributes:
        calls: passes over all images once.
        wall_s: of the plain passes: the median times the calls.
        steps_s: the sum of layers, copies and ``between``.
        between: what lies between the steps.
        source: where times of the device come from: ``activity records`` or ``events``; on a CPU ``host
            clock``, which times the layers.
        median_s, clocked_s, metered_s, inside_s: medians of one pass of the largest batch: plain, with the
            clock read after each step, under ``source``, and with the parts of a fused network counted; None
            where there is none.
        samples, metered_samples: how many passes of the first two kinds each, and of the third.
        sampled_s: of the passes that the ``samples_s`` of the steps are of, all of them together.
        empty_pair_s: what two events with nothing in between take, which was subtracted; None without events.
    """

    calls: int
    wall_s: float
    steps_s: float
    source: str
    between: list[Between] = field(default_factory=list)
    median_s: float = 0.0
    clocked_s: float = 0.0
    metered_s: float | None = None
    inside_s: float | None = None
    samples: int = 0
    metered_samples: int = 0
    sampled_s: float | None = None
    empty_pair_s: float | None = None


@dataclass
class Stop:
    """When and why the timing of whole passes stopped.

    Attributes:
        reason: a sentence.
        median_ms, interval_ms: the median pass of a full batch, and its 95 % interval within this run, which
            allows for samples that depend on each other and for having looked often; None where there are
            too few. How the next run would differ is not in it.
    """

    reason: str
    median_ms: float | None = None
    interval_ms: tuple[float, float] | None = None


@dataclass
class Accuracy:
    """Number of ``total`` images with their label's class as the most probable.

    Attributes:
        correct, total: images.
        top5_correct: with their class among the five most probable; None where there are no more than five,
            or it is not known.
    """

    correct: int
    total: int
    top5_correct: int | None = None

    @property
    def top1(self) -> float:
        return self.correct / self.total if self.total else 0.0

    @property
    def top5(self) -> float | None:
        if self.top5_correct is None:
            return None
        return self.top5_correct / self.total if self.total else 0.0

    def __add__(self, other: Accuracy) -> Accuracy:
        known = self.top5_correct is not None and other.top5_correct is not None
        return Accuracy(
            self.correct + other.correct,
            self.total + other.total,
            self.top5_correct + other.top5_correct if known else None,
        )


@dataclass
class Prediction:
    """The network's outputs for one image.

    Attributes:
        file: that it was read from.
        label: the number of its class, where it is known.
        top: the numbers of the classes with the largest outputs, the largest first.
        outputs: their outputs.
        names: of these classes, where they are known; ``label_name``: of the label's.
    """

    file: str
    label: int | None
    top: list[int]
    outputs: list[float]
    names: list[str] = field(default_factory=list)
    label_name: str | None = None


@dataclass
class Latency:
    """Wall times of forward passes of one full batch, in milliseconds, from raw ``samples_ms``.

    Attributes:
        thinned_from: samples that there were, where only some were kept.
        written: the figures that a document has of all of them, which those that were kept cannot give.
    """

    samples_ms: list[float]
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    thinned_from: int | None = None
    written: dict[str, float] | None = None

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.thinned_from or len(self.samples_ms)

    def to_dict(self) -> dict[str, float | int]:
        if self.written is not None:
            return {**self.written, "samples": self.count}
        samples = np.asarray(self.samples_ms)
        result: dict[str, float | int] = {"min": float(samples.min())}
        for percentile in sorted({50.0, 90.0, 99.0, *self.percentiles}):
            result[f"p{percentile:g}"] = float(np.percentile(samples, percentile))
        result["max"] = float(samples.max())
        result["mean"] = float(samples.mean())
        result["samples"] = self.count
        return result


@dataclass
class TimelineEvent:
    """One step of the layer-timed run, for traces.

    Attributes:
        name, kind: of the layer, or of the copy (kind ``copy``).
        track: such as ``host``, ``cuda:0 stream``: where the time was spent.
        start_s, seconds: since the beginning of the layer-timed run.
        batch: which pass, counted from 0.
    """

    name: str
    kind: str
    track: str
    start_s: float
    seconds: float
    batch: int


@dataclass
class Result:
    """All that a run found. docs/reference/report_columns.md has the units."""

    command: str
    environment: dict[str, Any]
    network: str
    weights: str
    dataset: dict[str, Any]  # name, source, images
    device: str  # such as cpu, cuda:0
    device_name: str  # the model of the CPU or GPU
    variant: str
    variant_reason: str | None  # why `auto` chose it; None when it was asked for
    reduction: bool
    dtype: str
    data_mode: str
    batch: int
    threads: int
    phases: Phases = field(default_factory=Phases)
    accuracy: Accuracy | None = None
    predictions: list[Prediction] = field(
        default_factory=list
    )  # of some images, where they are files
    check: Check | None = None
    layers: list[LayerTime] = field(default_factory=list)
    copies: list[CopyTime] = field(default_factory=list)
    latency: Latency | None = None
    throughput_images_per_s: float | None = None
    # Of the whole passes, by source: `cpu` (all packages, other processes included), `gpu`.
    energy_j_per_image: dict[str, float] | None = None
    stop: Stop | None = None
    timed_pass: TimedPass | None = None
    whole_pass: WholePass | None = None  # `pass` in the JSON document
    memory: dict[str, int] | None = None  # peak_activation_bytes of a pass, weights_bytes
    started: str | None = None  # when: ISO 8601, UTC
    duration_s: float | None = None  # of the call that made it, its check included
    profile: Profile | None = None  # what filled the time; None unless it was asked for
    iterations: int = 0  # complete passes over all images in the run that does not time layers
    images_done: int = 0  # images of the first pass; fewer than dataset images when interrupted
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    # Of a user's own: kernel, file, operator, target, nodes, computes.
    kernels: list[dict[str, Any]] = field(default_factory=list)
    # Of --tune: node, kernel, form, instead_of, seconds, seconds_instead (of a call).
    tuned: list[dict[str, Any]] = field(default_factory=list)
    roofline: dict[str, Any] | None = None  # of --roofline: see :class:`.roofline.Roofline`
    timeline: list[TimelineEvent] = field(default_factory=list)  # of the first passes only
    timeline_total: int = 0  # events there would be of all passes
    extra_lines: list[str] = field(
        default_factory=list
    )  # the workload's own lines of the text report

    @property
    def computes_in(self) -> str:
        """The types of the layers that multiply: ``int8``, ``int8 in 51 of 53 layers, else float32`` ..."""
        multiply = [layer for layer in self.layers if layer.flops]
        integer = sum(layer.kind.startswith("quantized_") for layer in multiply)
        if not integer:
            return self.dtype
        if integer == len(multiply):
            return "int8"
        return f"int8 in {integer} of {len(multiply)} layers, else {self.dtype}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON document, schema 1: plain numbers, strings, lists and dictionaries."""
        latency = self.latency
        return {
            "schema": SCHEMA,
            "command": self.command,
            "started": self.started,
            "duration_s": self.duration_s,
            "environment": self.environment,
            "network": self.network,
            "weights": self.weights,
            "dataset": self.dataset,
            "device": self.device,
            "device_name": self.device_name,
            "variant": self.variant,
            "variant_reason": self.variant_reason,
            "reduction": self.reduction,
            "dtype": self.dtype,
            "data_mode": self.data_mode,
            "batch": self.batch,
            "threads": self.threads,
            "memory": self.memory,
            "accuracy": self.accuracy
            and {**asdict(self.accuracy), "top1": self.accuracy.top1, "top5": self.accuracy.top5},
            "predictions": [asdict(prediction) for prediction in self.predictions],
            "check": self.check and {**asdict(self.check), "passed": self.check.passed},
            "phases": {**asdict(self.phases), "total_s": self.phases.total_s},
            "layers": [_step(layer) for layer in self.layers],
            "copies": [_step(copy) for copy in self.copies],
            "pass": self.whole_pass and asdict(self.whole_pass),
            "timed_pass": self.timed_pass and asdict(self.timed_pass),
            "profile": self.profile and self.profile.to_dict(),
            "latency_ms": latency and latency.to_dict(),
            "latency_samples_ms": latency and thinned(latency.samples_ms),
            "stop": self.stop and asdict(self.stop),
            "throughput_images_per_s": self.throughput_images_per_s,
            "energy_j_per_image": self.energy_j_per_image,
            "iterations": self.iterations,
            "images_done": self.images_done,
            "interrupted": self.interrupted,
            "notes": self.notes,
            "kernels": self.kernels,
            "tuned": self.tuned,
            "roofline": self.roofline,
            "extra_lines": self.extra_lines,
            "timeline": {
                "total": self.timeline_total,
                "columns": [column.name for column in fields(TimelineEvent)],
                "events": [list(vars(event).values()) for event in self.timeline],
            },
        }

    @classmethod
    def from_dict(cls, document: Any, name: str = "result") -> Result:
        """Returns the result of a JSON document of schema 1; ``name`` is for messages.

        Keys that this version does not know are ignored. Where samples were thinned, the figures of all of
        them are those that were written.

        Raises:
            InputError: the document is of another schema, or lacks a key, or a value is of another kind.
        """
        if not isinstance(document, dict) or "schema" not in document:
            raise expected(name, "the JSON document of a run, with a schema", brief(document))
        if document["schema"] != SCHEMA:
            raise expected(f"{name}: schema", SCHEMA, brief(document["schema"]))
        values = dict(document)
        samples, found = values.pop("latency_samples_ms", None), values.pop("latency_ms", None)
        if samples:
            count = found.get("samples") if isinstance(found, dict) else None
            values["latency"] = {
                "samples_ms": samples,
                "percentiles": _percentiles(found),
                "thinned_from": count,
                "written": _written(found, count, samples, f"{name}: latency_ms"),
            }
        values["whole_pass"] = values.pop("pass", None)
        timeline = values.pop("timeline", None) or {"total": 0, "events": []}
        if not isinstance(timeline, dict) or not isinstance(timeline.get("events"), list):
            raise expected(f"{name}: timeline", "an object with a list of events", brief(timeline))
        names = [column.name for column in fields(TimelineEvent)]
        for event in timeline["events"]:
            if not isinstance(event, list) or len(event) != len(names):
                raise expected(f"{name}: timeline", f"events of {len(names)} values", brief(event))
        values["timeline"] = [dict(zip(names, e, strict=True)) for e in timeline["events"]]
        values["timeline_total"] = timeline.get("total")
        result = read(cls, values, name)
        read(_Dataset, result.dataset, f"{name}: dataset")
        read(_Memory | None, result.memory, f"{name}: memory")
        warnings = result.environment.get("warnings")
        read(list[str] | None, warnings, f"{name}: environment: warnings")
        return result


@dataclass
class _Dataset:
    """What every result says of its images."""

    name: str
    source: str
    images: int
    total_images: int | None = None  # where more than those that are timed
    predicted_images: int | None = None


@dataclass
class _Memory:
    """What every result with the memory of a pass says of it, in bytes."""

    peak_activation_bytes: int
    weights_bytes: int


def _step(step: LayerTime | CopyTime) -> dict[str, Any]:
    return {**asdict(step), "samples_s": thinned(step.samples_s)}


def _written(latency: Any, count: Any, kept: Any, name: str) -> dict[str, float] | None:
    """Returns the figures of ``latency_ms`` where they are of more samples than were ``kept``; else None.

    Raises:
        InputError: one that every document has is missing, or is no number; ``name`` is the path to it.
    """
    if not isinstance(count, int) or not isinstance(kept, list) or count <= len(kept):
        return None
    percentiles = sorted({50.0, 90.0, 99.0, *_percentiles(latency)})
    keys = ["min", *(f"p{percentile:g}" for percentile in percentiles), "max", "mean"]
    for key in keys:
        if key not in latency:
            raise InputError(f"{name}: {key}: expected a value, found none")
    return {key: read(float, latency[key], f"{name}: {key}") for key in keys}


def _percentiles(latency: Any) -> list[float]:
    """Returns which percentiles ``latency_ms`` has."""
    words = [key[1:] for key in latency if key[:1] == "p"] if isinstance(latency, dict) else []
    found = [float(word) for word in words if word.replace(".", "", 1).isdecimal()]
    return [percentile for percentile in found if percentile <= 100]
