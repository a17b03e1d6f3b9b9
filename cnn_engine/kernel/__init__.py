"""Kernels of your own: ``cnn-engine kernel new | check | rank | grade | board``."""

from .command import main

__all__ = ["main"]
