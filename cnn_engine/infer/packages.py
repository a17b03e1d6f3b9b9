"""The packages of the extra ``infer``, imported when they are needed and named where they are missing."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from ..errors import UnsupportedError


def need(module: str, distribution: str, purpose: str, extra: str = "infer") -> ModuleType:
    """Returns ``module``.

    Raises:
        UnsupportedError: it is not installed; says what it is for and what installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"infer: expected the package {distribution} {purpose}, found none ({error}); "
            f"pip install 'cnn-engine[{extra}]'"
        ) from error


def arrow() -> ModuleType:
    """Returns ``pyarrow``."""
    return need("pyarrow", "pyarrow", "for Parquet files")


def parquet() -> ModuleType:
    """Returns ``pyarrow.parquet``."""
    return need("pyarrow.parquet", "pyarrow", "for Parquet files")


def keep_memory() -> None:
    """Has Arrow take memory from the C library, unless ``ARROW_DEFAULT_MEMORY_POOL`` says otherwise.

    Its own choice, mimalloc, gives memory back after some milliseconds without use: writers that take turns
    get it anew each time, for more of the system's time than their own work takes. It must be said before
    Arrow is loaded.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
