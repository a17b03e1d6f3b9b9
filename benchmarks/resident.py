"""The memory of a process that does nothing but run a network: so it imports nothing but the engine.

``python -m benchmarks.resident resident TASK``, as :mod:`benchmarks.models_worker`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cnn_engine import Engine


def resident(task: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the memory of a process that does nothing but run a network, as Linux counts it.

    Args:
        task: ``file`` (an ONNX model), ``threads`` and ``batch``.

    Returns:
        ``weights_bytes``; ``before_bytes``, of the interpreter with the engine imported; ``peak_bytes``, the
        most that was resident at any time.
    """
    before = _resident_bytes("VmRSS")
    engine = Engine(task["file"], device="cpu", threads=task["threads"])
    images = np.zeros((task["batch"], *engine.network.input_shape), np.float32)
    name = engine.network.base.inputs[0].name
    for _ in range(3):
        engine.run({name: images})
    constants = engine.network.base.constants.values()
    return {
        "weights_bytes": sum(array.nbytes for array in constants),
        "before_bytes": before,
        "peak_bytes": _resident_bytes("VmHWM"),
    }


def _resident_bytes(key: str) -> int:
    """Returns a line of this process's status; not getrusage's, which knows the parent's too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status: expected {key}, found none")


def main() -> int:
    """Measures; prints what was found."""
    import argparse  # when nothing is measured

    parser = argparse.ArgumentParser(description="One measurement of python -m benchmarks.models.")
    parser.add_argument("stage", help="its name")
    parser.add_argument("task", type=json.loads, help="what is measured, as JSON")
    print(json.dumps(resident(parser.parse_args().task)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
