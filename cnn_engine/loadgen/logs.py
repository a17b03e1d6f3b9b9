"""LoadGen's own logs of a run: verdict, figures, and answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import expected

#: Figures of ``mlperf_log_detail.txt`` -> keys of the result, and what turns them into seconds.
FIGURES = {
    "result_validity": ("validity", None),
    "result_min_latency_ns": ("min_s", 1e-9),
    "result_50.00_percentile_latency_ns": ("p50_s", 1e-9),
    "result_90.00_percentile_latency_ns": ("p90_s", 1e-9),
    "result_99.00_percentile_latency_ns": ("p99_s", 1e-9),
    "result_99.90_percentile_latency_ns": ("p999_s", 1e-9),
    "result_max_latency_ns": ("max_s", 1e-9),
    "result_mean_latency_ns": ("mean_s", 1e-9),
    "result_query_count": ("queries", None),
    "result_samples_per_second": ("images_per_s", None),
    "result_completed_samples_per_sec": ("completed_images_per_s", None),
    "result_scheduled_samples_per_sec": ("scheduled_images_per_s", None),
    "result_min_duration_met": ("min_duration_met", None),
    "result_min_queries_met": ("min_queries_met", None),
    "early_stopping_met": ("early_stopping_met", None),
    "result_perf_constraints_met": ("latency_bound_met", None),
    "result_invalid_reason": ("reason", None),
}


def details(path: Path) -> dict[str, Any]:
    """Returns the figures of ``mlperf_log_detail.txt``, and the errors that LoadGen logged.

    Raises:
        InputError: it is not there, or is no log of LoadGen's.
    """
    found: dict[str, Any] = {"errors": []}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise expected(str(path), "a log of LoadGen's", error) from None
    for line in lines:
        prefix, _, text = line.partition(" ")
        if prefix != ":::MLLOG":
            continue
        entry = json.loads(text)
        if entry["key"] in FIGURES:
            name, unit = FIGURES[entry["key"]]
            found[name] = entry["value"] if unit is None else entry["value"] * unit
        elif entry.get("metadata", {}).get("is_error"):
            found["errors"].append(f"{entry['key']}: {entry['value']}")
    return found


def answers(path: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the answers of a run in accuracy mode, of ``mlperf_log_accuracy.json``.

    Returns:
        numbers of images int64 [N], and their rows of outputs float32 [N, classes].

    Raises:
        InputError: it is no such log.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        indices = np.array([entry["qsl_idx"] for entry in entries], np.int64)
        data = b"".join(bytes.fromhex(entry["data"]) for entry in entries)
        return indices, np.frombuffer(data, np.float32).reshape(len(entries), classes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise expected(str(path), "a log of accuracy of LoadGen's", error) from None
