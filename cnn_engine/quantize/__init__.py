"""From a float ONNX model to one of 8-bit integers: ``cnn-engine quantize``, and as a function.

    quantized = cnn_engine.quantize("net.onnx", images)
    onnx.save(quantized.model, "net.int8.onnx")

The module is the function, too: the command ``python -m cnn_engine.quantize`` has the same name.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """A module that is called as :func:`.quantizing.quantize`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from .quantizing import quantize

        return quantize(*arguments, **options)


sys.modules[__name__].__class__ = _Callable


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    from .command import main as command

    return command(arguments)


__all__ = ["main"]
