"""What a run found, as objects; :meth:`Result.to_dict` is the JSON document (schema 1)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

SCHEMA = 1


@dataclass
class LayerTime:
    """The time of one layer, summed over ``calls`` calls.

    Attributes:
        name, kind: such as ``conv1``, ``conv``. The padded copy of the variant ``pad`` is a layer of its
            own, of kind ``pad``.
        place: ``cpu`` or ``cuda``: where it ran.
        host_s: seconds that the call took on the host: all of the work on the CPU, the launch on CUDA.
        device_s: seconds between the events around the kernel on its stream; None on the CPU.
        flops, bytes: of all calls; multiply-adds count two, bytes count each tensor once.
    """

    name: str
    kind: str
    place: str
    calls: int = 0
    host_s: float = 0.0
    device_s: float | None = None
    flops: int = 0
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """The time of the work itself: the device's where there is one, else the host's."""
        return self.host_s if self.device_s is None else self.device_s


@dataclass
class CopyTime:
    """The time of copies of one thing in one direction, summed over ``calls`` calls.

    Attributes:
        what: such as ``images``, ``conv1 input``, ``weights``.
        direction: ``h2d`` or ``d2h``.
        seconds: between the events around the copy on its stream.
    """

    what: str
    direction: str
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Accuracy:
    """How many of ``total`` images have their label's class as the most probable."""

    correct: int
    total: int

    @property
    def top1(self) -> float:
        return self.correct / self.total if self.total else 0.0


@dataclass
class Check:
    """How far the outputs are from the float64 reference, on ``images`` images.

    ``passed`` is whether ``max_abs_diff`` is within ``tolerance`` (of probabilities).
    """

    reference: str
    images: int
    max_abs_diff: float
    top1_agreement: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.max_abs_diff <= self.tolerance  # False for NaN


@dataclass
class Phases:
    """Seconds of each phase of a run; None for a phase that did not take place.

    ``forward_s`` is the wall time of one forward pass over all images, copies included, in the run that
    does not time layers; ``total_s`` is the sum of the other phases.
    """

    load_data_s: float | None = None
    create_network_s: float | None = None
    load_parameters_s: float | None = None
    create_outputs_s: float | None = None
    forward_s: float | None = None
    accuracy_s: float | None = None
    free_memory_s: float | None = None

    @property
    def total_s(self) -> float:
        return sum(seconds for seconds in asdict(self).values() if seconds is not None)


@dataclass
class Latency:
    """Wall times of forward passes of one full batch, in milliseconds, from raw ``samples_ms``."""

    samples_ms: list[float]
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)

    def to_dict(self) -> dict[str, float | int]:
        samples = np.asarray(self.samples_ms)
        result: dict[str, float | int] = {"min": float(samples.min())}
        for percentile in sorted({50.0, 90.0, 99.0, *self.percentiles}):
            result[f"p{percentile:g}"] = float(np.percentile(samples, percentile))
        result["max"] = float(samples.max())
        result["mean"] = float(samples.mean())
        result["samples"] = len(samples)
        return result


@dataclass
class TimelineEvent:
    """One step of the layer-timed run, for traces.

    Attributes:
        name, kind: of the layer, or of the copy (kind ``copy``).
        track: ``host``, ``cuda stream``: where the time was spent.
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
    """All that a run found. See DESIGN of the JSON document in the README for the units."""

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
    check: Check | None = None
    layers: list[LayerTime] = field(default_factory=list)
    copies: list[CopyTime] = field(default_factory=list)
    latency: Latency | None = None
    throughput_images_per_s: float | None = None
    iterations: int = 0  # complete passes over all images in the run that does not time layers
    images_done: int = 0  # images of the first pass; fewer than dataset images when interrupted
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    timeline: list[TimelineEvent] = field(default_factory=list)  # of the first passes only
    timeline_total: int = 0  # events there would be of all passes
    extra_lines: list[str] = field(
        default_factory=list
    )  # the workload's own lines of the text report

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON document, schema 1: plain numbers, strings, lists and dictionaries."""
        return {
            "schema": SCHEMA,
            "command": self.command,
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
            "accuracy": self.accuracy and {**asdict(self.accuracy), "top1": self.accuracy.top1},
            "check": self.check and {**asdict(self.check), "passed": self.check.passed},
            "phases": {**asdict(self.phases), "total_s": self.phases.total_s},
            "layers": [asdict(layer) for layer in self.layers],
            "copies": [asdict(copy) for copy in self.copies],
            "latency_ms": self.latency and self.latency.to_dict(),
            "throughput_images_per_s": self.throughput_images_per_s,
            "iterations": self.iterations,
            "images_done": self.images_done,
            "interrupted": self.interrupted,
            "notes": self.notes,
        }
