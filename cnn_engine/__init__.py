"""A CNN inference engine with hand-written CUDA and CPU kernels, and the measurement tools around it."""

from __future__ import annotations

from . import interrupts  # noqa: F401 - first: from here on, Ctrl-C ends our commands in one line

# isort: split
import importlib
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from . import _cpu  # noqa: F401 - before all else that needs it, so that the error is about it
except ImportError:
    if importlib.util.find_spec("cnn_engine._cpu") is not None:
        raise
    raise ImportError(
        f"cnn_engine: expected compiled kernels for this Python in {Path(__file__).parent}, found none; "
        "install the package first (in a clone: pip install -e .)"
    ) from None

from .errors import CnnEngineError, DeviceError, InputError, UnsupportedError
from .graph.network import Conv2d, Linear, MaxPool2d, Network, Relu, Softmax, Tanh
from .workload import Dataset, Workload, register

if TYPE_CHECKING:
    from . import ops, quantize
    from .classify import Classifier
    from .engine.engine import Engine
    from .engine.saved import load_engine
    from .graph.onnx import load
    from .kernels import Kernel
    from .vision.viewer import Detector, detect

__version__ = "0.2.0"

#: What is done and what is chosen, for programs that want to know: nothing is shown unless they set a level.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "Classifier",
    "CnnEngineError",
    "Conv2d",
    "Dataset",
    "DeviceError",
    "Detector",
    "Engine",
    "InputError",
    "Kernel",
    "Linear",
    "MaxPool2d",
    "Network",
    "Relu",
    "Softmax",
    "Tanh",
    "UnsupportedError",
    "Workload",
    "detect",
    "load",
    "load_engine",
    "ops",
    "quantize",
    "register",
]

#: What is imported when first asked for: describing and training networks needs no kernels and no ONNX.
_ON_REQUEST = {
    "Classifier": ".classify",
    "Detector": ".vision.viewer",
    "detect": ".vision.viewer",
    "Engine": ".engine.engine",
    "Kernel": ".kernels",
    "load": ".graph.onnx",
    "load_engine": ".engine.saved",
    "ops": ".ops",
    "quantize": ".quantize",
}


def __getattr__(name: str) -> Any:
    if name in _ON_REQUEST:
        module = importlib.import_module(_ON_REQUEST[name], __name__)
        return getattr(module, name, module)
    if name == "_cpu":
        try:
            return importlib.import_module("._cpu", __name__)
        except ImportError as error:
            raise ImportError(
                f"cnn_engine: expected its compiled module _cpu in {Path(__file__).parent}, found: "
                f"{error}; in the source folder, `pip install -e .` builds it there"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
