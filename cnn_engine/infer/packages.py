"""The packages of the extra ``infer``, imported when they are needed and named where they are missing."""

from __future__ import annotations

import os
from types import ModuleType

from .. import cli


def need(module: str, distribution: str, purpose: str) -> ModuleType:
    """Returns ``module``, of the extra ``infer``.

    Raises:
        UnsupportedError: it is not installed; says what it is for and what installs it.
    """
    return cli.need("infer", module, distribution, purpose, "cnn-engine[infer]")


def arrow() -> ModuleType:
    """Returns ``pyarrow``."""
    return need("pyarrow", "pyarrow", "for Parquet files")


def parquet() -> ModuleType:
    """Returns ``pyarrow.parquet``."""
    return need("pyarrow.parquet", "pyarrow", "for Parquet files")


def keep_memory() -> None:
    """Makes Arrow allocate memory by the C library, unless ``ARROW_DEFAULT_MEMORY_POOL`` says otherwise.

    Its own choice, mimalloc, gives memory back after some milliseconds without use: writers that take turns
    get it anew each time, for more of the system's time than their own work takes. It must be said before
    Arrow is loaded.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
