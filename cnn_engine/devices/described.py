"""Devices that are described only: plans are decided for them and not run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ..target import Target
from . import cuda_module


class DescribedDevice:
    """A device for decisions about kernels only: it has no memory and no stream.

    Args:
        target: what it can do.
        name: what reports call it; default: the target's name.
    """

    context = nullcontext()
    note = None

    def __init__(self, target: Target, name: str = "") -> None:
        self.target = target
        self.kind = target.kind
        self.name = name or target.name
        self.model = target.name

    @property
    def kernels(self) -> Any:
        """The compiled functions, whose cost models answer for any GPU.

        Raises:
            UnsupportedError: this installation was built without the CUDA kernels.
        """
        return cuda_module.load()
