"""``cnn-engine compare``: results of ``run --json`` against the first of them, with verdicts."""

from .command import main

__all__ = ["main"]
