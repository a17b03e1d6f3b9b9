"""What the tests of characterisation share: a short run, its reports, and points to begin with."""

from __future__ import annotations

import csv
from pathlib import Path

from cnn_engine import characterize
from cnn_engine.characterize.points import Point

QUICK = ["--device", "cpu", "--data", "synthetic", "--images", "24", "--settle", "0.01",
         "--duration", "0.06", "--sample-period", "0.02"]  # fmt: skip


def run(folder: Path, *options: str) -> int:
    """Runs the command on the CPU for a moment; returns its exit code."""
    return characterize.main([*QUICK, "--output", str(folder), *options])


def rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV report."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def point(**values) -> Point:
    """Returns a point of a variant on a GPU, with ``values`` in it."""
    known = {
        "subject": "net if", "kind": "engine", "model": "net", "variant": "if", "reduction": False,
        "dtype": "float32", "device": "cuda:0", "boundary": "host", "batch": 4,
    }  # fmt: skip
    return Point(**(known | values))
