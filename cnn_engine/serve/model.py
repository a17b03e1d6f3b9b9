"""One network that is served. Tensors are checked before they wait: no request spoils another's pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np

from ..graph.dims import Dim
from .batching import Arrays, Batcher, Job
from .errors import Refused, invalid
from .protocol import DATATYPES, Request
from .replicas import Settings
from .statistics import Statistics


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
        self._replicas = settings.replicas(source)
        try:
            about = self._replicas.about
            self.form, self.inputs, self.outputs = about.form, about.inputs, about.outputs
            self._reads = {value.name: value for value in self.form.inputs}
            self.platform = "cnn_engine"
            self._normalises = about.normalise is not None
            self._takes = {value.name: self._types(value) for value in self.inputs}
            self.labels = about.labels
            # An engine that splits images into passes as it likes may have them put together as well.
            self.batched = self.form.in_parts and self.form.any_batch and settings.largest > 1
            self.largest = settings.largest if self.batched else 0
            # Not what could be indices: a client may change them after they have been checked.
            self.reads_in_place = self.form.is_of_images and self._replicas.on_host
            self._batcher = Batcher(
                self._replicas.runs, settings.largest, settings.delay_s, settings.queue,
                self.statistics, self._replicas.local,
            )  # fmt: skip
        except BaseException:
            self._replicas.close()
            raise

    def close(self) -> None:
        """Answers waiting requests, and frees the network; returns when that is done."""
        self._batcher.close()
        self._replicas.close()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._batcher.waiting

    @property
    def running(self) -> int:
        """Passes that run now."""
        return self._batcher.running

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
        if self._normalises:
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
