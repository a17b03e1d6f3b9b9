"""Workers as Ray's actors: on the machines of a cluster, each with a GPU or a CPU that Ray gives it."""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from time import monotonic
from typing import Any

from ..errors import CnnEngineError
from ..ray_cluster import connect, died_of
from .worker import Worker

Event = dict[str, Any]

#: Seconds that an actor may take to start where nothing else can take its place.
START_S = 300.0

#: Seconds that a call for events waits for one, so that it ends soon after an actor does.
WAIT_S = 1.0

#: Seconds that calls to actors which were ended may take to say so, before Ray is shut down beneath them.
CLOSE_S = 10.0


class Actor:
    """A worker in a process of Ray; its calls replace the local engine's pipes."""

    def __init__(self, config: Event) -> None:
        self._events: queue.Queue[Event] = queue.Queue()
        with suppress(OSError):
            os.chdir(config["cwd"])  # which the paths of inputs may be relative to
        try:
            self._worker = Worker(config, self._events.put)
            self._events.put(self._worker.hello())
        except CnnEngineError as error:
            self._events.put({"event": "error", "message": str(error)})

    def send(self, message: Event) -> None:
        """Executes a command."""
        self._worker.handle(message)

    def take(self) -> list[Event]:
        """Returns the events since the last call; waits a moment for one."""
        found = []
        end = monotonic() + WAIT_S
        with suppress(queue.Empty):
            found.append(self._events.get(timeout=max(end - monotonic(), 0)))
            while True:
                found.append(self._events.get_nowait())
        return found


class RayPool:
    """Actors, placed by their needs: a GPU each, or CPUs.

    An actor whose machine is lost is started again where there is room; where there is none it waits, and the
    others go on. All machines see the output folder and the inputs under the same paths.
    """

    def __init__(self, config: Event, workers: int, cuda: bool, address: str | None) -> None:
        self._ray = ray = connect(address, workers)
        # On a cluster, an actor may have to wait until there is room.
        self.start_limit_s: float | None = None if address else START_S
        resources = ray.cluster_resources()
        cpus, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
        count = config["threads"]
        if count is None:
            count = max(cpus // max(gpus, 1), 1) if cuda else max(cpus // workers, 1)
        self._config = {**config, "threads": count, "device": "cuda" if cuda else "cpu"}
        self._actor = ray.remote(Actor).options(
            num_cpus=min(count, cpus), num_gpus=1 if cuda else 0, max_concurrency=4, max_restarts=0,
            scheduling_strategy="SPREAD",
        )  # fmt: skip
        self._cpus = cpus
        self.events: queue.Queue[tuple[int, Event]] = queue.Queue()
        self._actors: dict[int, Any] = {}
        self._outboxes: dict[int, queue.Queue[Event | None]] = {}
        self._callers: list[threading.Thread] = []
        self._closing = False

    def start(self, worker: int) -> None:
        self._outboxes[worker] = outbox = queue.Queue()
        try:
            actor = self._actor.remote(self._config)
        except Exception as error:  # plain ones too, where its own processes do not answer
            self._actors[worker] = None
            self.events.put((worker, {"event": "died", "reason": died_of(error)}))
            return
        self._actors[worker] = actor
        for call, args in ((self._listen, (worker, actor)), (self._talk, (actor, outbox))):
            caller = threading.Thread(target=call, args=args, daemon=True)
            self._callers.append(caller)
            caller.start()

    def _listen(self, worker: int, actor: Any) -> None:
        ray = self._ray
        while not self._closing:
            try:
                found = ray.get(actor.take.remote())
                if self._actors[worker] is not actor:
                    return
                for event in found:
                    self.events.put((worker, event))
            except (
                Exception
            ) as error:  # RayActorError and its kin: the process or its machine is gone
                if self._actors[worker] is not actor:
                    return
                self._outboxes[worker].put(None)
                if not self._closing:
                    self.events.put((worker, {"event": "died", "reason": died_of(error)}))
                return

    def _talk(self, actor: Any, outbox: queue.Queue[Event | None]) -> None:
        """Sends messages one after the other: an actor that answers several at once keeps no order."""
        with suppress(Exception):  # it has ended, which its listener says
            while (message := outbox.get()) is not None:
                self._ray.get(actor.send.remote(message))
            return
        if not self._closing:
            with suppress(Exception):
                self._ray.kill(actor)

    def send(self, worker: int, message: Event) -> None:
        self._outboxes[worker].put(message)

    def kill(self, worker: int) -> None:
        with suppress(Exception):
            self._ray.kill(self._actors[worker])

    def cores(self) -> int:
        return self._cpus

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        for worker in self._actors:
            self._outboxes[worker].put(None)
            self.kill(worker)
        end = monotonic() + CLOSE_S
        for caller in self._callers:
            caller.join(max(end - monotonic(), 0))
        self._ray.shutdown()
