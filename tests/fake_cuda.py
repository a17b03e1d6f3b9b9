"""A CUDA device that is not there: its memory is the host's, its kernels are the CPU's.

What an engine plans for a GPU can so be looked at, and run for its numbers, on a machine without one.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from cnn_engine import _cpu
from cnn_engine.devices.cpu import CpuDevice


class FakeFused:
    """Takes every network, and runs it as the CPU's fused network does, in float32."""

    whole = True

    def __init__(self, *arguments: Any) -> None:
        self._network = _cpu.FusedNetwork(*arguments[:4], "float32")

    @staticmethod
    def why_not(*arguments: Any) -> str:
        return ""

    def run(self, images: int, pixels: bool, count: int, to: int, stream: int) -> None:
        self._network.run(images, pixels, count, to, 1)


class FakeKernels:
    """``_cuda``: the CPU's function of the same name, on one thread."""

    FusedNetwork = FakeFused

    def __getattr__(self, name: str) -> Any:
        function = getattr(_cpu, name)

        def launch(*arguments: Any) -> Any:
            *arguments, _stream = arguments
            direct = _cpu.Conv2dVariant.direct
            tiled = _cpu.Conv2dVariant.tiled
            return function(*(direct if a == tiled else a for a in arguments), 1)

        return launch


class FakeCuda(CpuDevice):
    """``cuda:0``."""

    kind = "cuda"
    name = "cuda:0"
    index = 0
    stream_handle = 7
    model = "a fake"
    stream = None

    def __init__(self) -> None:
        super().__init__()
        self.kernels = FakeKernels()
        self.context = nullcontext()
        self.properties = {
            "name": self.model,
            "managed_memory": True,
            "multiprocessors": 132,
            "total_memory": 2**37,
        }

    def lane(self) -> FakeCuda:
        return FakeCuda()

    def on(self, stream: int) -> FakeCuda:
        other = FakeCuda()
        other.stream_handle = stream
        return other

    allocate_managed = CpuDevice.allocate

    def check_managed(self, nbytes: int) -> None: ...

    def empty_pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def is_pinned(self, address: int) -> bool:
        return False

    def copy_h2d(self, to: int, source: int, nbytes: int) -> None:
        _cpu.copy(source, to, nbytes, 1)

    copy_d2h = copy_h2d

    def event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None)

    def is_current(self) -> bool:
        return True


def install(monkeypatch) -> None:
    """Makes every device ``cuda...`` that is asked for a fake."""
    from cnn_engine import devices

    real = devices.select

    def select(name: str) -> Any:
        return FakeCuda() if name.startswith("cuda") else real(name)

    monkeypatch.setattr(devices, "select", select)
