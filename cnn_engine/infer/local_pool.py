"""Workers as processes of this machine."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..devices import cuda_module, threads
from ..errors import InputError
from ..io.files import describe_os_error

Event = dict[str, Any]

#: Lines that a worker wrote to standard error before it ended, for the message about that.
KEPT_LINES = 5


def visible_gpus() -> list[str]:
    """Returns how ``CUDA_VISIBLE_DEVICES`` calls the GPUs that are there for this process."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = cuda_module.device_count()
    if named:
        return [name.strip() for name in named.split(",")][:count]
    return [str(index) for index in range(count)]


class LocalPool:
    """Processes, each with a GPU of its own or a share of the CPUs.

    They get their work through pipes, so that they end when this process does, however it ends; what
    the terminal sends to this process, such as Ctrl-C, does not reach them.

    Args:
        config: of every worker; see :class:`cnn_engine.infer.worker.Worker`.
        workers: how many there may be at a time.
        cuda: whether each is to have one of the GPUs, in turn.
    """

    #: Seconds that a process may take to start.
    start_limit_s: float | None = 300.0

    def __init__(self, config: Event, workers: int, cuda: bool) -> None:
        self._config, self._workers = config, workers
        self._gpus = visible_gpus() if cuda else []
        self.events: queue.Queue[tuple[int, Event]] = queue.Queue()
        self._processes: dict[int, subprocess.Popen] = {}
        self._listeners: dict[int, threading.Thread] = {}
        self._closing = False

    def start(self, worker: int) -> None:
        """As :meth:`.supervise.Pool.start` says.

        Raises:
            InputError: the system starts no more processes.
        """
        environment = dict(os.environ)
        # Where this process found the package, installed or not.
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        config = dict(self._config)
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[worker % len(self._gpus)]
            config["device"] = "cuda"
        if config["threads"] is None:
            config["threads"] = max(threads.default() // self._workers, 1)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "cnn_engine.infer.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"worker: cannot be started: {describe_os_error(error)}") from error
        self._processes[worker] = process
        listener = threading.Thread(target=self._listen, args=(worker, process), daemon=True)
        self._listeners[worker] = listener
        listener.start()
        self._write(process, config)

    def _listen(self, worker: int, process: subprocess.Popen) -> None:
        last: list[str] = []

        def errors() -> None:
            for line in process.stderr:
                last.append(line.strip())
                del last[:-KEPT_LINES]

        reading = threading.Thread(target=errors, daemon=True)
        reading.start()
        for line in process.stdout:
            if self._processes[worker] is process:
                with suppress(ValueError):  # a line that was cut off when the worker was killed
                    self.events.put((worker, json.loads(line)))
        code = process.wait()
        reading.join()
        process.stdout.close()
        process.stderr.close()
        with suppress(OSError):  # what could not be sent any more
            process.stdin.close()
        if not self._closing and self._processes[worker] is process:
            self.events.put((worker, {"event": "died", "reason": _reason(code, last)}))

    @staticmethod
    def _write(process: subprocess.Popen, message: Event) -> None:
        with suppress(OSError, ValueError):  # it has ended, which its listener says
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def send(self, worker: int, message: Event) -> None:
        self._write(self._processes[worker], message)

    def kill(self, worker: int) -> None:
        self._processes[worker].kill()

    def cores(self) -> int:
        return threads.default()

    def close(self) -> None:
        self._closing = True
        for process in self._processes.values():
            process.kill()
        for listener in self._listeners.values():
            listener.join()


def _reason(code: int, lines: list[str]) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
        return f"signal {-code}"
    said = next((line for line in reversed(lines) if line), "")
    return f"exit code {code}" + (f": {said}" if said else "")
