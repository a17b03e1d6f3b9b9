"""Results made up for the tests of comparisons."""

from __future__ import annotations

import json

import numpy as np

from cnn_engine import report
from cnn_engine.measure.result import Check, CopyTime, Latency, LayerTime, Phases, Result, TimedPass

CHECK = Check("NumPy float64", 20, 1e-6, 1.0, 1e-5)


def made(samples=None, *, seed=0, **changes) -> Result:
    """A result of ten passes or ``samples`` (seconds), each spent on two layers and a copy."""
    if samples is None:
        samples = 1e-3 * (1 + 0.001 * np.random.default_rng(seed).standard_normal(60))
    samples = np.asarray(samples, float)
    parts = {
        name: list(share * samples)
        for name, share in (("conv1", 0.6), ("fc", 0.2), ("images", 0.1))
    }
    calls, batch = len(samples), changes.get("batch", 10)
    layers = [
        LayerTime(name, kind, "cpu", calls, sum(parts[name]), None, calls, calls, parts[name])
        for name, kind in (("conv1", "conv"), ("fc", "fc"))
    ]
    values = {
        "command": "cnn-engine run", "network": "small", "weights": "default",
        "environment": {"host": "here", "versions": {"numpy": "2.0"}, "commit": "abc", "warnings": []},
        "dataset": {"name": "synthetic", "source": "synthetic", "images": batch * calls},
        "device": "cpu", "device_name": "CPU", "variant": "pad", "variant_reason": None,
        "reduction": False, "dtype": "float32", "data_mode": "resident", "batch": batch, "threads": 1,
        "phases": Phases(forward_s=float(samples.sum())), "check": CHECK, "layers": layers,
        "copies": [CopyTime("images", "h2d", calls, calls, sum(parts["images"]), parts["images"])],
        "latency": Latency(list(1e3 * samples)), "iterations": 1, "images_done": batch * calls,
        "throughput_images_per_s": batch * calls / float(samples.sum()),
        "timed_pass": TimedPass(calls, float(samples.sum())),
    }  # fmt: skip
    return Result(**{**values, **changes})


def written(path, result: Result, **changes) -> str:
    """Writes ``result`` as JSON, its document changed by ``changes``; returns the path."""
    document = json.loads(report.json.dumps(result)) | changes
    path.write_text(json.dumps(document))
    return str(path)
