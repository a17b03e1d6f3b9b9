"""Replicas of a served model as Ray's actors, on the machines of a cluster.

Actors, not Ray Serve: the protocol, the batches and the loading of models are this server's own, and Ray adds
what it is good at, which is placing replicas and starting them again where one or its machine is lost.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from ..errors import CnnEngineError, InputError, expected
from ..locks import ForkSafeLock
from ..ray_cluster import connect, died_of
from .batching import Arrays
from .errors import Refused
from .replicas import SAVED, About, LocalReplicas, Settings

log = logging.getLogger(__name__)

#: Seconds that the first replica of a model may take to start.
START_S = 120.0

#: Seconds that a pass looks for a replica while none is there.
PATIENCE_S = 60.0

#: Replicas that may be lost with one pass: it may be what ends them.
LOSSES = 3

#: Seconds between two looks.
PAUSE_S = 0.1


class Replica:
    """An engine in a process of Ray.

    Args:
        name: of the file, or of the network.
        content: a reference to the file's bytes, in a list, else Ray would wait for it: a replica that is
            started later has the same weights; None: a network that has a name.
    """

    def __init__(self, name: str, content: list[Any] | None, settings: Settings) -> None:
        self._error = ""
        try:
            found = None if content is None else connect(None).get(content[0])
            self._replicas = _of_bytes(name, found, settings)
        except (
            CnnEngineError
        ) as error:  # said by about: an actor that does not start is tried again
            self._error = str(error)

    def about(self) -> About | str:
        """Returns the description of the network, or the reason why its engine could not be made."""
        return self._error or self._replicas.about

    def run(self, inputs: Arrays) -> Arrays | CnnEngineError:
        """Runs one pass; returns this package's errors, since Ray would wrap a raised one."""
        try:
            return self._replicas.runs[0](inputs)
        except CnnEngineError as error:
            return error


def _of_bytes(name: str, content: bytes | None, settings: Settings) -> LocalReplicas:
    if content is None:
        return LocalReplicas(name, settings)
    if not name.endswith(SAVED):
        return LocalReplicas(content, settings)
    with tempfile.TemporaryDirectory() as folder:  # it is mapped, and stays so
        path = Path(folder) / os.path.basename(name)
        path.write_bytes(content)
        return LocalReplicas(path, settings)


class RayReplicas:
    """Replicas that Ray places: a GPU each, or CPUs.

    A pass whose replica is lost runs on another one: it changes nothing, so that it may be run again. Ray
    starts the lost one anew, where there is room.

    Raises:
        InputError: the file or the address is at fault, or no replica starts.
    """

    local = on_host = False

    def __init__(self, source: Path | str, settings: Settings) -> None:
        self._ray = ray = connect(settings.address)
        content = [ray.put(source.read_bytes())] if isinstance(source, Path) else None
        (device,) = settings.devices
        cuda = device.startswith("cuda")
        own = Settings(("cuda" if cuda else "cpu",), settings.dtype, threads=settings.threads)
        # A CPU is needed for the place alone, Ray's rule where none is named: several models share it, and
        # the next version of one has room while the last still answers.
        room: dict[str, Any] = {"num_gpus": 1} if cuda else {}
        self._make = partial(
            ray.remote(Replica).options(
                max_restarts=-1, max_task_retries=0, max_concurrency=2,
                scheduling_strategy="SPREAD", **room,
            ).remote,
            str(source), content, own,
        )  # fmt: skip
        self._lock = ForkSafeLock()
        self._closing = False
        self._lost: set[int] = set()
        self._actors = [self._make() for _ in range(settings.instances)]
        self.runs: list[Callable[[Arrays], Arrays]] = [
            partial(self._run, number) for number in range(settings.instances)
        ]
        try:
            about = self._first(ray)
            if isinstance(about, str):
                raise InputError(about)
            self.about: About = about
        except BaseException:
            self.close()
            raise

    def _first(self, ray: Any) -> About | str:
        """Returns what the first replica says that is ready; the others may still wait for room."""
        try:
            asked = [actor.about.remote() for actor in self._actors]
            ready, _ = ray.wait(asked, num_returns=1, timeout=START_S)
            if not ready:
                raise expected(
                    "--engine", "room for a replica on the cluster", f"none in {START_S:g} s"
                )
            return ray.get(ready[0])
        except ray.exceptions.RayError as error:
            raise expected("--engine", "a replica that starts", died_of(error)) from error

    def _run(self, first: int, inputs: Arrays) -> Arrays:
        """Runs one pass on replica ``first``, or on another one where that is lost.

        Raises:
            Refused: no replica has been there for a minute, or :data:`LOSSES` were lost with this pass.
        """
        ray, end = self._ray, monotonic() + PATIENCE_S
        count, losses, reason = len(self._actors), 0, "none has started"
        while losses < LOSSES and monotonic() < end and not self._closing:
            order = ((first + n) % count for n in range(count))
            number = next((n for n in order if n not in self._lost), None)
            if number is None:
                sleep(PAUSE_S)
                continue
            actor = self._actors[number]
            try:
                found = ray.get(actor.run.remote(inputs))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error  # of the engine: another replica would have it, too
            except ray.exceptions.RayError as error:
                reason, losses = died_of(error), losses + 1
                self._lose(number, actor, reason)
                continue
            if isinstance(found, CnnEngineError):
                raise found
            return found
        raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"no replica has answered: {reason}")

    def _lose(self, number: int, actor: Any, reason: str) -> None:
        """Notes that a replica is lost, and waits on a thread of its own until it is there again."""
        with self._lock:
            if number in self._lost or self._actors[number] is not actor or self._closing:
                return
            self._lost.add(number)
        log.warning("replica %d: lost: %s", number, reason)
        threading.Thread(target=self._recover, args=(number,), daemon=True).start()

    def _recover(self, number: int) -> None:
        ray = self._ray
        while not self._closing:
            try:
                ray.get(self._actors[number].about.remote())
            except ray.exceptions.ActorDiedError:  # Ray has given it up
                with self._lock:
                    if not self._closing:
                        self._actors[number] = self._make()
            except ray.exceptions.RayError:
                pass
            else:
                self._lost.discard(number)
                log.info("replica %d: back", number)
                return
            sleep(PAUSE_S)

    def close(self) -> None:
        """Stops the replicas."""
        with self._lock:
            self._closing = True
        for actor in self._actors:
            with suppress(Exception):  # its machine may be gone
                self._ray.kill(actor)
