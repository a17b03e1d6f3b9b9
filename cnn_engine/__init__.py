"""A CNN inference engine with hand-written CUDA and CPU kernels, and the laboratory around it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from .errors import CnnEngineError, DeviceError, InputError, UnsupportedError
from .graph.network import Conv2d, Linear, MaxPool2d, Network, Relu, Softmax, Tanh
from .workload import Dataset, Workload, register

__all__ = [
    "CnnEngineError",
    "Conv2d",
    "Dataset",
    "DeviceError",
    "Engine",
    "InputError",
    "Linear",
    "MaxPool2d",
    "Network",
    "Relu",
    "Softmax",
    "Tanh",
    "UnsupportedError",
    "Workload",
    "register",
]


def __getattr__(name: str) -> Any:
    # The engine needs the compiled kernels; describing and training networks does not.
    if name == "Engine":
        from .engine.engine import Engine

        return Engine
    if name == "_cpu":
        try:
            return importlib.import_module("._cpu", __name__)
        except ImportError as error:
            raise ImportError(
                f"cnn_engine: expected its compiled module _cpu in {Path(__file__).parent}, found: "
                f"{error}; in the source folder, `pip install -e .` builds it there"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
