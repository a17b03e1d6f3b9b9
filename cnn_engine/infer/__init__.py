"""``cnn-engine infer``: predictions for data sets of any size, in a table, once each."""

from .command import main

__all__ = ["main"]
