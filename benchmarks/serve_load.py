"""Clients of ``serve``, over HTTP, JSON, gRPC and shared memory: each compares answers with ``predict``."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from cnn_engine import Engine

from .serve_process import Server, write_network

#: Images that are asked for; one of them has a NaN, and one an infinity.
IMAGES, SIZE = 64, 12
#: Images of one request at most.
ROWS = 4


class Truth:
    """Images, and their rows by ``predict``, of both files that the model has in turn."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.images = np.random.default_rng(0).standard_normal((IMAGES, 3, SIZE, SIZE), np.float32)
        self.images[7, 1, 2, 3], self.images[9, 0, 0, 0] = np.nan, np.inf
        self.rows: list[np.ndarray] = []
        self.files: list[bytes] = []
        for seed in (0, 1):
            path = folder / f"truth-{seed}.onnx"
            write_network(path, seed, size=SIZE)
            self.files.append(path.read_bytes())
            with Engine(path, device="cpu", threads=threads) as engine:
                self.rows.append(
                    np.concatenate([engine.predict(self.images[n : n + 1]) for n in range(IMAGES)])
                )

    def is_right(self, numbers: np.ndarray, found: np.ndarray) -> bool:
        """Whether an answer is one file's, to the bit; NaN is NaN."""
        return any(np.array_equal(found, rows[numbers], equal_nan=True) for rows in self.rows)


class Load:
    """Clients that ask at a steady rate, each on a thread of its own.

    Attributes:
        outcomes: of each way: ``right``, ``refused`` (503 while the model is unloaded or the queue is full),
            ``wrong`` and ``lost``.
        faulty: the first few answers that were wrong or lost.
    """

    def __init__(self, truth: Truth, server: Server, rate: float) -> None:
        self._truth, self._server, self._rate = truth, server, rate
        self._lock, self._stop = threading.Lock(), threading.Event()
        self.outcomes: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
        self.faulty: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self, clients: int) -> None:
        """Starts so many clients; ways take turns."""
        for number in range(clients):
            way = list(WAYS)[number % len(WAYS)]
            thread = threading.Thread(target=self._client, args=(way, number), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ends the clients once each has its answer; one that has none after two minutes is lost."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            if thread.is_alive():
                self._count("http", "lost", "no answer after 120 s")

    def _count(self, way: str, outcome: str, about: object = "") -> None:
        with self._lock:
            self.outcomes[way][outcome] += 1
            if outcome in ("wrong", "lost") and len(self.faulty) < 20:
                self.faulty.append(f"{way}: {outcome}: {about}"[:300])

    def _client(self, way: str, number: int) -> None:
        from tritonclient.utils import InferenceServerException

        chance = np.random.default_rng(number)
        with WAYS[way](self._server, number) as ask:
            while True:
                numbers = chance.integers(0, IMAGES, chance.integers(1, ROWS + 1))
                try:
                    found = ask(self._truth.images[numbers])
                except InferenceServerException as error:
                    text = str(error)
                    refused = "not ready: " in text or "requests wait already" in text
                    self._count(way, "refused" if refused else "lost", text)
                except Exception as error:
                    self._count(way, "lost", f"{type(error).__name__}: {error}")
                else:
                    right = self._truth.is_right(numbers, found)
                    self._count(way, "right" if right else "wrong", numbers)
                if self._stop.wait(chance.exponential(1 / self._rate)):
                    return


class ByHttp:
    """Asks over HTTP, with tensors as bytes."""

    binary = True

    def __init__(self, server: Server, number: int) -> None:
        import tritonclient.http as client

        self._client = client
        self._server = client.InferenceServerClient(f"127.0.0.1:{server.http_port}")

    def __enter__(self) -> Callable[[np.ndarray], np.ndarray]:
        return self.ask

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def ask(self, images: np.ndarray) -> np.ndarray:
        tensor = self._client.InferInput("x", images.shape, "FP32")
        tensor.set_data_from_numpy(images, binary_data=self.binary)
        output = self._client.InferRequestedOutput("y", binary_data=self.binary)
        return self._server.infer("m", [tensor], outputs=[output]).as_numpy("y")


class ByJson(ByHttp):
    """Asks over HTTP, with tensors in JSON, which has no NaN: images without."""

    binary = False

    def ask(self, images: np.ndarray) -> np.ndarray:
        if np.isfinite(images).all():
            return super().ask(images)
        self.binary = True
        try:
            return super().ask(images)
        finally:
            self.binary = False


class ByGrpc(ByHttp):
    """Asks over gRPC."""

    def __init__(self, server: Server, number: int) -> None:
        import tritonclient.grpc as client

        self._client = client
        self._server = client.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")

    def ask(self, images: np.ndarray) -> np.ndarray:
        tensor = self._client.InferInput("x", images.shape, "FP32")
        tensor.set_data_from_numpy(images)
        return self._server.infer("m", [tensor]).as_numpy("y")


class ByMemory(ByHttp):
    """Asks over HTTP, with tensors in shared memory."""

    def __init__(self, server: Server, number: int) -> None:
        import tritonclient.utils.shared_memory as memory

        super().__init__(server, number)
        self._memory, name = memory, f"serve-faults-{os.getpid()}-{number}"
        self._name, self._size = name, ROWS * 3 * SIZE * SIZE * 4
        self._region = memory.create_shared_memory_region(name, f"/{name}", self._size + 4096)
        self._server.register_system_shared_memory(name, f"/{name}", self._size + 4096)

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):  # the server may have ended
            self._server.unregister_system_shared_memory(self._name)
        self._memory.destroy_shared_memory_region(self._region)
        super().__exit__()

    def ask(self, images: np.ndarray) -> np.ndarray:
        self._memory.set_shared_memory_region(self._region, [images])
        tensor = self._client.InferInput("x", images.shape, "FP32")
        tensor.set_shared_memory(self._name, images.nbytes)
        output = self._client.InferRequestedOutput("y", binary_data=True)
        output.set_shared_memory(self._name, len(images) * 5 * 4, self._size)
        self._server.infer("m", [tensor], outputs=[output])
        found = self._memory.get_contents_as_numpy(
            self._region, np.float32, (len(images), 5), self._size
        )
        return found.copy()


WAYS = {"http": ByHttp, "grpc": ByGrpc, "shared memory": ByMemory, "json": ByJson}
