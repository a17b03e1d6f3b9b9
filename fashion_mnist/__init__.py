"""Fashion-MNIST: the network of a GPU programming course, and its images."""

from .network import WORKLOAD

__all__ = ["WORKLOAD"]
