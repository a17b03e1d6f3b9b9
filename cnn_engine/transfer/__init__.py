"""The CPU-to-GPU transfer profiler: the time to move a batch of images against the batch size.

``python -m cnn_engine.transfer``; see docs/transfer.md for what is timed, the files and the fits.
"""

from .command import main

__all__ = ["main"]
