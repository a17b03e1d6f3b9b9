"""What the tests of transfers share: raw files of known times, and a device whose copies take known time."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cnn_engine.devices import Buffer
from cnn_engine.devices.cuda import CudaDevice
from cnn_engine.transfer import files, main
from cnn_engine.transfer.subjects import Mode

INTERCEPT, SLOPE, BREAK = 6e-6, 340e-9, 22
LATE_INTERCEPT, LATE_SLOPE = 14e-6, 270e-9


def two_pieces(batch: np.ndarray) -> np.ndarray:
    """Seconds that jump at :data:`BREAK`."""
    return np.where(batch < BREAK, INTERCEPT + SLOPE * batch, LATE_INTERCEPT + LATE_SLOPE * batch)


def write_raw(
    raw: Path,
    seconds: Callable[[np.ndarray], np.ndarray],
    batches: np.ndarray,
    *,
    network: str = "cifar10",
    gpu: str = "NVIDIA_H200",
    mode: Mode | None = None,
    samples: int = 9,
    noise: float = 0.0,
    seed: int = 0,
) -> Path:
    """Writes raw files with medians ``seconds(batch)`` and relative ``noise``; returns its folder."""
    generator = np.random.default_rng(seed)
    suffix = (mode or Mode()).suffix
    folder = raw / gpu / "transfer" / network
    for batch in batches:
        (folder / str(batch)).mkdir(parents=True, exist_ok=True)
        median = float(seconds(np.asarray(batch))) * (1 + noise * generator.standard_normal())
        spread = np.linspace(-1, 1, samples) * 0.05 * median
        spread[samples // 2] = 0
        files.write_times(
            folder / str(batch) / f"data_transfer_time{suffix}.txt",
            list(generator.permutation(median + spread)),
        )
    return folder


class FakeDevice:
    """A CUDA device whose memory is the host's, and whose copies move its clock by ``seconds(bytes)``.

    Attributes:
        clock: in seconds; :meth:`now` reads it.
        copies: bytes and direction of each copy.
        corrupts: whether copies to the device lose a byte.
        event_s: what an event takes.
        interrupt_after: copies after which the next raises KeyboardInterrupt; None: never.
        reaches_others: whether copies to other devices go past the host.
        pages_on_device: whether managed memory was prefetched to the device last.
        captured: copies that are nodes of graphs.
    """

    kind, name, note, model = "cuda", "cuda:0", None, "Fake GPU/1 (test)"
    pci_bus_id = "ffff:ff:1f.0"
    stream = None

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds = seconds
        self.clock = 0.0
        self.copies: list[tuple[int, str]] = []
        self.corrupts = False
        self.event_s = 0.0
        self.interrupt_after: int | None = None
        self.reaches_others = True
        self.pages_on_device = False
        self.captured = 0
        self.properties = {"managed_memory": True, "concurrent_managed_access": True}
        self.stream_handle = 7
        self.free = 2**34
        self.context = nullcontext()
        self.kernels = SimpleNamespace(
            driver_version=lambda: 13000, runtime_version=lambda: 13000, compiler="nvcc 13.0"
        )

    def now(self) -> float:
        return self.clock

    def free_memory(self) -> int:
        return self.free

    def allocate(self, nbytes: int) -> Buffer:
        array = np.zeros(max(nbytes, 1), np.uint8)
        return Buffer(array.ctypes.data, nbytes, array)

    def empty_pinned(self, shape: tuple[int, ...], dtype: object) -> np.ndarray:
        return np.empty(shape, dtype)

    def check_managed(self, nbytes: int, option: str) -> None:
        CudaDevice.check_managed(self, nbytes, option)

    allocate_managed = allocate

    def prefetch(self, address: int, nbytes: int, to_host: bool) -> None:
        if to_host != self.pages_on_device:
            return  # they are there
        self._copy(address, address, nbytes, "d2h" if to_host else "h2d")
        self.pages_on_device = not to_host
        if self.corrupts and not to_host:
            self._corrupt(address, nbytes)

    def capture(self, run: Callable[[int], None]) -> tuple[Callable[[int], None], list[int]]:
        self.captured += 1

        def launch(stream: int) -> None:
            assert stream == self.stream_handle
            run(11)

        return launch, [self.stream_handle]

    def copy_h2d(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        self._copy(to, source, nbytes, "h2d")
        if self.corrupts:
            self._corrupt(to, nbytes)

    def copy_d2h(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        self._copy(to, source, nbytes, "d2h")

    def _corrupt(self, to: int, nbytes: int) -> None:
        ctypes.memset(to + nbytes // 2, 255 - ctypes.string_at(to + nbytes // 2, 1)[0], 1)

    def reaches(self, other: FakeDevice) -> bool:
        return self.reaches_others

    def copy_to_peer(self, other: FakeDevice, to: int, source: int, nbytes: int) -> None:
        self._copy(to, source, nbytes, "d2d")

    def _copy(self, to: int, source: int, nbytes: int, direction: str) -> None:
        if self.interrupt_after is not None and len(self.copies) >= self.interrupt_after:
            self.interrupt_after = None  # once
            raise KeyboardInterrupt
        ctypes.memmove(to, source, nbytes)
        self.clock += self.seconds(nbytes)
        self.copies.append((nbytes, direction))

    def synchronize(self) -> None:
        pass

    def delay(self, seconds: float) -> None:
        self.clock += seconds

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def elapsed_s(self, start: FakeEvent, end: FakeEvent) -> float:
        return end.at - start.at


class FakeEvent:
    """Remembers its device's clock."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at = float("nan")

    def record(self, stream: object) -> None:
        self.device.clock += self.device.event_s
        self.at = self.device.clock


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def error_line(capsys) -> str:
    """Returns the one line on standard error, which is an error."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def document(path: Path) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"not standard JSON: {constant}")

    return json.loads(path.read_text(), parse_constant=refuse)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
