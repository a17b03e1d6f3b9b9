"""One network that is served. Tensors are checked before they wait: no request spoils another's pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.engine import Engine
from ..engine.outputs import Outputs
from ..engine.saved import load_engine
from ..errors import CnnEngineError
from ..graph.dims import Dim
from ..graph.form import Form
from ..io.model_metadata import classes_of, preprocess_of
from .batching import Arrays, Batcher, Job
from .errors import Refused, invalid
from .protocol import DATATYPES, Request
from .statistics import Statistics

#: What saved engines end in; all else is a network for :class:`cnn_engine.Engine`.
SAVED = ".safetensors"


@dataclass(frozen=True)
class Settings:
    """Settings of served models.

    Attributes:
        devices: one engine for each.
        instances: passes that may run at once on each device.
        threads: of each pass on a CPU; None: as many as CPUs, over the instances.
        largest: images of a pass that requests share at most; 1: every request has a pass of its own.
        delay_s: seconds that a request waits for others.
        queue: requests of a model that may wait.
    """

    devices: tuple[str, ...] = ("auto",)
    dtype: str = "float32"
    instances: int = 1
    threads: int | None = None
    largest: int = 32
    delay_s: float = 0.0
    queue: int = 512

    def engine(self, source: Path | str, device: str) -> Engine:
        """Returns the engine of a file, or of a network that has a name."""
        options: dict[str, Any] = {"device": device, "threads": self.threads}
        if str(source).endswith(SAVED):
            return load_engine(source, **options)
        return Engine(source, dtype=self.dtype, **options)


class ServedModel:
    """A network that answers requests.

    Args:
        name, version: as clients call it.
        source: its file, or the name of a network.

    Attributes:
        batched: whether requests may share a pass, of up to :attr:`largest` images.
        reads_in_place: whether inputs in shared memory are read where they lie: images, on a CPU.

    Raises:
        InputError: the file is at fault.
        UnsupportedError: the device lacks what it needs.
    """

    def __init__(self, name: str, version: str, source: Path | str, settings: Settings) -> None:
        self.name, self.version, self.source = name, version, source
        self.statistics = Statistics()
        engines: list[Engine] = []
        try:
            for device in settings.devices:
                engines.append(settings.engine(source, device))
            first = engines[0]
            self.form: Form = first.form
            self._reads = {value.name: value for value in self.form.inputs}
            self.inputs, self.outputs = first.inputs, first.outputs
            self.platform = "cnn_engine"
            self._normalise = _normaliser(first)
            self._takes = {value.name: self._types(value) for value in self.inputs}
            self.labels = _labels(first)
            # An engine that splits images into passes as it likes may have them put together as well.
            self.batched = self.form.in_parts and self.form.any_batch and settings.largest > 1
            self.largest = settings.largest if self.batched else 0
            # Not what could be indices: a client may change them after they have been checked.
            self.reads_in_place = self.form.is_of_images and all(
                engine.device.kind == "cpu" for engine in engines
            )
            for engine in engines:
                _warm_up(engine, self.form)
            runs = [
                _runner(engine, self._normalise)
                for engine in engines
                for _ in range(settings.instances)
            ]
            self._engines = engines
            self._batcher = Batcher(
                runs, settings.largest, settings.delay_s, settings.queue, self.statistics
            )
        except BaseException:
            for engine in engines:
                engine.close()
            raise

    def close(self) -> None:
        """Answers waiting requests, and frees the network; returns when that is done."""
        self._batcher.close()
        for engine in self._engines:
            with suppress(CnnEngineError):  # an overflow of an earlier pass: it has been told
                engine.close()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._batcher.waiting

    def submit(
        self, request: Request, done: Callable[[Arrays | BaseException], None], here: bool = False
    ) -> None:
        """Queues a request; ``done`` is called with its outputs, or its exception.

        Args:
            here: of :meth:`.Batcher.submit`.

        Raises:
            Refused: the request does not fit the network, or the queue is full.
        """
        names = [wanted.name for wanted in request.outputs]
        known = [value.name for value in self.outputs]
        for name in names:
            if name not in known:
                raise invalid("outputs", f"some of {', '.join(known)}", name)
        if len(set(names)) != len(names):
            raise invalid("outputs", "each once", ", ".join(names))
        inputs, rows = self._checked(request.inputs)
        key = None
        if self.batched and 0 < rows < self.largest:
            key = tuple((name, array.shape[1:], array.dtype.char) for name, array in inputs.items())
        job = Job(inputs, rows, key, request.priority, request.timeout_s, done)
        self._batcher.submit(job, here)

    def _checked(self, inputs: Arrays) -> tuple[Arrays, int]:
        """Returns the inputs in the network's order and types, and their images."""
        if inputs.keys() != self._reads.keys():
            wanted, found = ", ".join(self._reads) or "none", ", ".join(inputs) or "none"
            raise invalid(f"{self.name}: inputs", wanted, found)
        checked: Arrays = {}
        for value in self.inputs:
            array = inputs[value.name]
            if not _fits(array.shape, value.shape):
                raise invalid(
                    f"{self.name}: {value.name}", f"shape {_shown(value.shape)}", list(array.shape)
                )
            if array.dtype not in self._takes[value.name]:
                names = sorted(dtype.name for dtype in self._takes[value.name])
                wanted = " or ".join(DATATYPES[name] for name in names)
                found = DATATYPES.get(array.dtype.name, array.dtype)
                raise invalid(f"{self.name}: {value.name}", wanted, found)
            checked[value.name] = array
        rows = {len(array) for name, array in checked.items() if name in self.form.rows}
        if len(rows) > 1:
            found = ", ".join(map(str, sorted(rows)))
            raise invalid(f"{self.name}: inputs", "as many images in each", found)
        return checked, rows.pop() if rows else 1

    def _types(self, value: Any) -> frozenset[np.dtype]:
        """Returns the types that an input may have."""
        takes = {value.dtype, "float32", "uint8"} if self.form.normalises else {value.dtype}
        if self._normalise is not None:
            takes.add("uint8")
        return frozenset(map(np.dtype, takes))

    # ---- what clients ask about a model ----

    def metadata(self) -> dict[str, Any]:
        """Returns the model's metadata as the protocol has it; open dimensions are -1."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": self.platform,
            "inputs": [_described(value) for value in self.inputs],
            "outputs": [_described(value) for value in self.outputs],
        }

    def config(self) -> dict[str, Any]:
        """Returns the model's configuration as Triton's clients read it: shapes without the batch."""

        def described(value: Any) -> dict[str, Any]:
            shape = _described(value)["shape"][1 if self.batched else 0 :]
            return {
                "name": value.name,
                "data_type": f"TYPE_{DATATYPES[value.dtype]}",
                "dims": shape,
            }

        return {
            "name": self.name,
            "platform": self.platform,
            "backend": "cnn_engine",
            "max_batch_size": self.largest,
            "input": [described(value) for value in self.inputs],
            "output": [described(value) for value in self.outputs],
        }


def _fits(shape: tuple[int, ...], wanted: Sequence[Any]) -> bool:
    """Whether a tensor has the shape; dimensions that are no numbers are open."""
    return len(shape) == len(wanted) and not any(
        isinstance(want, int) and have != want for have, want in zip(shape, wanted, strict=True)
    )


def _shown(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _described(value: Any) -> dict[str, Any]:
    datatype = DATATYPES.get(value.dtype)
    if datatype is None:
        raise Refused(
            HTTPStatus.NOT_IMPLEMENTED, f"{value.name}: the protocol has no {value.dtype}"
        )
    shape = [-1 if isinstance(dim, Dim) else dim for dim in value.shape]
    return {"name": value.name, "datatype": datatype, "shape": shape}


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


def _warm_up(engine: Engine, form: Form) -> None:
    """Runs one image of zeros, so that the first client waits for no plan and no compiler.

    A network whose sizes are open is left as it is: nobody knows which will come.
    """
    if form.sizes_of is not None:
        return
    inputs = {value.name: np.zeros(value.shape, value.dtype) for value in form.inputs}
    with suppress(CnnEngineError):  # zeros may be no input that it takes, such as lengths
        _runner(engine, None)(inputs)
