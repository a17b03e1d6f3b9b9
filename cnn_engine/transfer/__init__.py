"""The CPU-to-GPU transfer profiler: the time to move a batch of images against the batch size.

``cnn-engine transfer``: docs/how-to/measure_transfers.md.
"""

from .command import main

__all__ = ["main"]
