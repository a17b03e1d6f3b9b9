"""Copies between host and device memory in each mode of ``transfer``: plain, captured, prefetched."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from .subjects import GRAPH, Mode


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Copy:
    """A copy that can be made again and again.

    Attributes:
        run: queues it on the device's stream.
        before: puts the bytes back where they come from, and waits; called ahead of ``run``, never timed.
    """

    run: Callable[[], None]
    before: Callable[[], None] = _nothing


def of_device(device: Any, mode: Mode, remote: int, local: int, nbytes: int) -> Copy:
    """Returns the copy between the device's memory at ``remote`` and the host's at ``local``.

    As a CUDA graph of one node where the mode says so: what a launch of a captured copy takes.
    """
    if mode.direction == "h2d":
        copy = partial(device.copy_h2d, remote, local, nbytes)
    else:
        copy = partial(device.copy_d2h, local, remote, nbytes)
    if mode.memory != GRAPH:
        return Copy(copy)
    launch, _ = device.capture(lambda stream: copy(stream=stream))
    return Copy(lambda: launch(device.stream_handle))


def of_pages(device: Any, mode: Mode, address: int, nbytes: int) -> Copy:
    """Returns the move of the pages of managed memory, by a prefetch."""
    to_host = mode.direction == "d2h"

    def before() -> None:
        device.prefetch(address, nbytes, to_host=not to_host)
        device.synchronize()

    return Copy(partial(device.prefetch, address, nbytes, to_host=to_host), before)


def managed_array(device: Any, nbytes: int) -> tuple[np.ndarray, Any]:
    """Returns managed memory as an array of bytes, and the buffer to be kept for as long as the array.

    Raises:
        UnsupportedError: the device has none, or its pages do not move on demand, so that host and device
            may not both use it.
        InputError: ``nbytes`` are more than a quarter of what is free on the device.
    """
    device.check_managed(nbytes, "--memory managed")
    if not device.properties["concurrent_managed_access"]:
        raise UnsupportedError(
            f"--memory managed: expected a GPU whose pages can be prefetched, found {device.model}, whose "
            "driver moves them at a kernel's start alone"
        )
    buffer = device.allocate_managed(nbytes)
    array = (ctypes.c_uint8 * nbytes).from_address(buffer.address)
    return np.ctypeslib.as_array(array), buffer
