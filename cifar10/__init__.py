"""CIFAR-10: the network of the thesis, its images, and weights trained for it."""

from .network import WORKLOAD

__all__ = ["WORKLOAD"]
