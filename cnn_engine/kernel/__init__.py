"""Kernels of your own: ``python -m cnn_engine.kernel new | check | rank``."""

from .command import main

__all__ = ["main"]
