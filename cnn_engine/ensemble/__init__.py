"""Ensembles: one pipeline that reads and decodes images once, and many networks that it feeds.

``mpirun -n R python -m cnn_engine.ensemble``, or without ``mpirun`` one process: docs/how-to/ensembles.md.
"""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    from .command import main as command

    return command(arguments)


__all__ = ["main"]
