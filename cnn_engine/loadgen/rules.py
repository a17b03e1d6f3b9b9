"""The rules of MLPerf Inference, of ``loadgen/mlperf.conf`` in https://github.com/mlcommons/inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCENARIOS = ("SingleStream", "MultiStream", "Server", "Offline")

#: Seconds of an official run.
OFFICIAL_S = 600

#: How much faster than it was a contestant may become: there are queries for it.
SLACK = 1.5
#: The same of streams, which end by time: they must not run out of queries, and last no longer for more.
SPARE = 10.0

#: Images that are held while queries are issued, at most.
HELD = 1024


@dataclass(frozen=True)
class Rule:
    """A scenario's rules for image classification.

    Attributes:
        percentile: of latencies that the result is, or must be within the bound.
        queries: at least so many.
        samples: images of a query.
    """

    percentile: float
    queries: int = 1
    samples: int = 1


RULES = {
    "SingleStream": Rule(0.90, queries=100),
    "MultiStream": Rule(0.99, queries=662, samples=8),
    "Server": Rule(0.99, queries=100),
    "Offline": Rule(0.90, queries=1),
}

#: Images of an Offline query at least, and the seeds of version 6.0's round.
OFFLINE_SAMPLES = 24576
QSL_SEED, INDEX_SEED, SCHEDULE_SEED = (
    2085463073848966840, 2747215439041700203, 16159082839903944936,
)  # fmt: skip


def settings(
    loadgen: Any,
    scenario: str,
    accuracy: bool,
    duration_s: float,
    rate: float,
    target_qps: float,
    latency_s: float,
) -> Any:
    """Returns LoadGen's settings of a run.

    Args:
        loadgen: the module ``mlperf_loadgen``.
        accuracy: whether every image is asked for once, and no times count.
        duration_s: seconds of queries at least.
        rate: images per second that are expected; LoadGen makes as many queries as fill the time.
        target_qps: queries per second of Server.
        latency_s: bound of Server's latencies.
    """
    rule = RULES[scenario]
    made = loadgen.TestSettings()
    made.scenario = getattr(loadgen.TestScenario, scenario)
    made.mode = loadgen.TestMode.AccuracyOnly if accuracy else loadgen.TestMode.PerformanceOnly
    made.min_duration_ms = round(duration_s * 1000)
    made.min_query_count = rule.queries
    made.qsl_rng_seed, made.sample_index_rng_seed = QSL_SEED, INDEX_SEED
    made.schedule_rng_seed = SCHEDULE_SEED
    if scenario == "SingleStream":
        made.single_stream_target_latency_percentile = rule.percentile
        made.single_stream_expected_latency_ns = round(1e9 / (SPARE * rate))
    elif scenario == "MultiStream":
        made.multi_stream_target_latency_percentile = rule.percentile
        made.multi_stream_samples_per_query = rule.samples
        made.multi_stream_expected_latency_ns = round(1e9 * rule.samples / (SPARE * rate))
    elif scenario == "Server":
        made.server_target_latency_percentile = rule.percentile
        made.server_target_latency_ns = round(latency_s * 1e9)
        made.server_target_qps = target_qps
    else:
        made.offline_expected_qps = SLACK * rate
        if duration_s >= OFFICIAL_S:
            made.min_query_count = OFFLINE_SAMPLES
    return made
