"""Metrics for Prometheus, made from the models' statistics when it asks: requests cost nothing more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from .repository import Repository
from .statistics import BOUNDS

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Collector:
    def __init__(self, models: Repository) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics as they are now."""
        labels = ["model", "version"]
        requests = CounterMetricFamily(
            "cnn_engine_requests", "Requests by outcome.", labels=[*labels, "outcome"]
        )
        images = CounterMetricFamily("cnn_engine_images", "Images that were run.", labels=labels)
        passes = CounterMetricFamily(
            "cnn_engine_passes", "Passes, of one request or more.", labels=labels
        )
        queue = CounterMetricFamily(
            "cnn_engine_queue_seconds", "Seconds that requests waited.", labels=labels
        )
        compute = CounterMetricFamily(
            "cnn_engine_compute_seconds", "Seconds of passes, for each request.", labels=labels
        )
        waiting = GaugeMetricFamily("cnn_engine_waiting", "Requests that wait.", labels=labels)
        running = GaugeMetricFamily("cnn_engine_running", "Passes that run.", labels=labels)
        latency = HistogramMetricFamily(
            "cnn_engine_request_seconds", "Seconds from arrival to answer.", labels=labels
        )
        for model in self._models.models():
            key, found = [model.name, model.version], model.statistics
            for outcome, count in (
                ("success", found.success.count),
                ("error", found.fail.count),
                ("rejected", found.rejected),
            ):
                requests.add_metric([*key, outcome], count)
            images.add_metric(key, found.inferences)
            passes.add_metric(key, found.executions)
            queue.add_metric(key, found.queue.seconds)
            compute.add_metric(key, found.compute_infer.seconds)
            waiting.add_metric(key, model.waiting)
            running.add_metric(key, model.running)
            bounds = [*map(str, BOUNDS), "+Inf"]
            counts = itertools.accumulate(found.buckets)
            latency.add_metric(key, list(zip(bounds, counts, strict=True)), found.success.seconds)
        yield from (requests, images, passes, queue, compute, waiting, running, latency)


def text(models: Repository) -> bytes:
    """Returns all metrics of a server in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(models))
    return generate_latest(registry)
