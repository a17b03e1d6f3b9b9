"""Engines that run the passes of a served model, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..engine.engine import Engine
from ..engine.outputs import Outputs
from ..engine.saved import load_engine
from ..errors import CnnEngineError
from ..graph.form import Form
from ..io.model_metadata import classes_of, preprocess_of
from .batching import Arrays

#: What saved engines end in; all else is a network for :class:`cnn_engine.Engine`.
SAVED = ".safetensors"


@dataclass(frozen=True)
class Settings:
    """Settings of served models.

    Attributes:
        devices: one engine for each.
        instances: passes that may run at once on each device; with Ray, replicas.
        threads: of each pass on a CPU; None: as many as CPUs, over the instances.
        largest: images of a pass that requests share at most; 1: every request has a pass of its own.
        delay_s: seconds that a request waits for others.
        queue: requests of a model that may wait.
        ray: whether passes run on replicas of a Ray cluster.
        address: of the cluster; None: an instance of Ray on this machine.
    """

    devices: tuple[str, ...] = ("auto",)
    dtype: str = "float32"
    instances: int = 1
    threads: int | None = None
    largest: int = 32
    delay_s: float = 0.0
    queue: int = 512
    ray: bool = False
    address: str | None = None

    def engine(self, source: Any, device: str) -> Engine:
        """Returns the engine of a file, of a network that has a name, or of a file's bytes."""
        options: dict[str, Any] = {"device": device, "threads": self.threads}
        if isinstance(source, (str, Path)) and str(source).endswith(SAVED):
            return load_engine(source, **options)
        return Engine(source, dtype=self.dtype, **options)

    def replicas(self, source: Path | str) -> Replicas:
        """Returns the engines of a model, here or on a cluster."""
        if self.ray:
            from .ray_replicas import RayReplicas

            return RayReplicas(source, self)
        return LocalReplicas(source, self)


@dataclass(frozen=True)
class About:
    """Inputs and outputs of a network, against which requests are checked.

    Attributes:
        normalise: makes float32 of pixels where the model's file says how; else None.
        labels: output -> the names of its classes, where the model's file has them.
    """

    form: Form
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    normalise: Callable[[np.ndarray], np.ndarray] | None
    labels: dict[str, Sequence[str]]


class Replicas(Protocol):
    """Engines that run the passes of a model.

    Attributes:
        runs: one for each pass that may run at once: name -> tensor in, name -> tensor out.
        local: whether passes run in this process.
        on_host: whether they read inputs in this machine's memory.
    """

    about: About
    runs: list[Callable[[Arrays], Arrays]]
    local: bool
    on_host: bool

    def close(self) -> None:
        """Frees the network."""


class LocalReplicas:
    """One engine for each device, which all of its instances share.

    Raises:
        InputError: the file is at fault.
        UnsupportedError: the device lacks what it needs.
    """

    local = True

    def __init__(self, source: Any, settings: Settings) -> None:
        self._engines: list[Engine] = []
        try:
            for device in settings.devices:
                self._engines.append(settings.engine(source, device))
            first = self._engines[0]
            normalise = _normaliser(first)
            self.about = About(first.form, first.inputs, first.outputs, normalise, _labels(first))
            self.runs = []
            for engine in self._engines:
                _warm_up(engine)
                self.runs += [_runner(engine, normalise)] * settings.instances
            self.on_host = all(engine.device.kind == "cpu" for engine in self._engines)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the network."""
        for engine in self._engines:
            with suppress(CnnEngineError):  # an overflow of an earlier pass: it has been told
                engine.close()


def _normaliser(engine: Engine) -> Callable[[np.ndarray], np.ndarray] | None:
    """Returns what makes float32 of pixels where the model's file says how; else None."""
    network = engine.network
    if not engine.form.is_of_images or engine.form.inputs[0].dtype != "float32":
        return None
    found = preprocess_of(network)
    if found is None or not found.normalises:
        return None
    found.check(network.input_shape)
    return found.normalised


def _labels(engine: Engine) -> dict[str, Sequence[str]]:
    """Returns output -> the names of its classes, where the model's file has them."""
    found = classes_of(engine.network) if engine.form.is_of_rows else None
    return {} if found is None else {engine.form.outputs[0].name: found.names}


def _runner(
    engine: Engine, normalise: Callable[[np.ndarray], np.ndarray] | None
) -> Callable[[Arrays], Arrays]:
    """Returns what runs one pass: by ``predict`` where there is one input, which is the faster call."""
    form = engine.form
    if len(form.inputs) != 1:
        return engine.run
    name = form.inputs[0].name
    outputs = [value.name for value in form.outputs]

    def run(inputs: Arrays) -> Arrays:
        images = inputs[name]
        if normalise is not None and images.dtype == np.uint8:
            images = normalise(images)
        found = engine.predict(images)
        return found.to_dict() if isinstance(found, Outputs) else {outputs[0]: found}

    return run


def _warm_up(engine: Engine) -> None:
    """Runs one image of zeros, so that the first client waits for no plan and no compiler.

    A network whose sizes are open is left as it is: nobody knows which will come.
    """
    form = engine.form
    if form.sizes_of is not None:
        return
    inputs = {value.name: np.zeros(value.shape, value.dtype) for value in form.inputs}
    with suppress(CnnEngineError):  # zeros may be no input that it takes, such as lengths
        _runner(engine, None)(inputs)
