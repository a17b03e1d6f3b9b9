"""Low-batch characterisation: latency, utilisation, memory, power and accuracy against the batch.

``cnn-engine characterize``; see docs/reference/characterize.md for every column.
"""

from .command import main

__all__ = ["main"]
