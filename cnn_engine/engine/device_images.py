"""Images that lie in a GPU's memory, where they come from files without a copy in the host's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _cpu
from ..devices import Buffer
from ..errors import expected

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .plan_runner import Plans


class DeviceImages:
    """Memory of a GPU for images, which are read from files and computed there; slices share it.

    Args:
        plans: of the engine.
        reader: of the device.
        shape: [N, C, H, W].
        dtype: uint8 or float32.

    Attributes:
        address: on the device.
        copies: whether what is read goes on to the device: not where reading alone is measured.
    """

    copies = True

    def __init__(
        self, plans: Plans, reader: Any, buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self._plans, self._reader, self._buffer = plans, reader, buffer
        self.shape, self.dtype, self.address = shape, dtype, buffer.address

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def image_bytes(self) -> int:
        """Bytes of one image."""
        return int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def __getitem__(self, some: slice) -> DeviceImages:
        first, last, step = some.indices(len(self))
        if step != 1:
            raise expected("images", "a slice without a step", step)
        shape = (max(last - first, 0), *self.shape[1:])
        part = DeviceImages(self._plans, self._reader, self._buffer, shape, self.dtype)
        part.address = self.address + first * self.image_bytes
        part.copies = self.copies
        return part

    def read(self, descriptor: int, offset: int) -> int:
        """Fills the images from byte ``offset`` of an open file; returns the number of bytes read.

        Python's lock is not held meanwhile. Several threads may call it: they are served in turn.

        Raises:
            OSError: the file cannot be read.
            DeviceError: the device failed.
        """
        to = self.address if self.copies else 0
        return self._reader.read(descriptor, offset, len(self) * self.image_bytes, to)

    def predict(self, out: NDArray[np.float32]) -> None:
        """Fills ``out``, page-locked float32 [N, classes], with the network's outputs for these images.

        Rows are the bits of :meth:`Engine.predict` over as many images of the host in one pass.

        Raises:
            InputError: the batch does not fit in memory, or the engine was closed.
            DeviceError: the device failed.
        """
        if len(out) != len(self):
            raise expected("out", f"{len(self)} rows", len(out))
        if len(self):
            pixels = self.dtype == np.uint8
            self._plans.run_in_device(len(self), pixels, self.address, _cpu.address_of(out))
