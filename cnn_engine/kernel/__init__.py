"""Kernels of your own: ``cnn-engine kernel new | check | rank``."""

from .command import main

__all__ = ["main"]
