"""A worker process: an engine and its pipeline, driven by JSON messages.

``python -m cnn_engine.infer.worker`` is a process of the local engine. Commands come on standard input,
events go to standard output, a line each. When standard input ends, so does the process: its parent is gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from ..engine.engine import Engine
from ..errors import CnnEngineError, UnsupportedError, expected
from ..graph.form import form_of
from ..graph.model import Model
from ..io import model_inputs
from ..io.model_metadata import classes_of, preprocess_of
from ..io.preprocess import Preprocess
from ..locks import ForkSafeLock
from ..measure import environment
from ..workload import Samples, Workload, get, of_model
from . import columns, memory, packages, stage_limits
from .buffers import Slot
from .chunk import dtype_of
from .decoding import Decoder
from .formats import Wanted
from .output import Record, ShardFile
from .pipeline import SLOTS, Pipeline, Settings, slot_type, waiting_chunks
from .shards import Shard

#: How often a worker says how far it is.
BEAT_S = 0.25

#: Seconds that a thread may keep Python's lock while others want it: a GPU computes a chunk in less than the
#: default.
SWITCH_S = 0.0005

#: Bytes of images that a chunk may have: enough on a GPU that what Python does for a chunk does not count, so
#: few that memory stays small.
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 128 << 20}

Message = dict[str, Any]


class Worker:
    """An engine with its pipeline.

    Args:
        config: ``network`` or ``model`` (with ``input_shape``, ``constants`` and ``like``, a file of inputs),
            ``weights``, ``device``, ``variant``, ``reduction``, ``dtype``, ``threads``, ``batch``, ``top``,
            ``columns``, ``preprocess``, and the ``kind`` of the first input.
        emit: takes events; called from several threads.

    Raises:
        CnnEngineError: the configuration is at fault, or cannot be had here.
    """

    def __init__(self, config: Message, emit: Callable[[Message], None]) -> None:
        self._config, self._emit = config, emit
        packages.keep_memory()
        packages.arrow()
        is_model = config.get("model") is not None
        workload = model_of(config) if is_model else get(config["network"])
        self.engine = Engine(
            workload,
            weights=config["weights"],
            device=config["device"],
            variant=config["variant"],
            reduction=config["reduction"],
            dtype=config["dtype"],
            threads=config["threads"],
        )
        network = self.engine.network
        self._preprocess_source = "--preprocess"
        if config["preprocess"] is not None:
            self._preprocess = Preprocess.parse(config["preprocess"])
        else:
            self._preprocess = preprocess_of(network)
            self._preprocess_source = None if self._preprocess is None else "the model's file"
        if self._preprocess is not None:
            self._preprocess.check(network.input_shape)
        form = self.engine.form
        self.wanted = Wanted(
            tuple(network.input_shape), config["columns"], columns.inputs_of(form),
            columns.is_a_file(form),
        )  # fmt: skip
        self.decoder = Decoder(
            network.input_shape, self._preprocess, self.engine.threads, self._normalises
        )
        self.columns = columns.of_engine(self.engine)
        self.batch = self._batch(config["batch"])
        self.top = config["top"]
        named = classes_of(network) if self.is_of_rows else None
        self.names = None if named is None else named.names
        if self.top is not None and not self.is_of_rows:
            raise expected("--top", "a network of classes", network.name)
        if self.top is not None and self.top > network.classes:
            raise expected("--top", f"at most {network.classes}, the network's classes", self.top)
        self.pipeline: Pipeline | None = None
        self._slots, self._rows = self._warm()

    def _warm(self) -> tuple[dict[type[Slot], list[Slot]], list[Samples]]:
        """Returns the pipeline's memory, for images and for rows, after a first pass and a first file.

        All of that takes long once on a GPU; on CPUs nothing is gained by it.
        """
        if self.engine.device.kind != "cuda" or not self.engine.form.is_of_images:
            return {}, []
        self.engine.device.sleep_while_waiting()  # the cores have images to decode
        self.engine.keep_sizes()
        kind = self._config["kind"]
        reads_floats = "uint8" not in self._reads or dtype_of(kind) == "float32"
        floats = ["float32"] if self._normalises or reads_floats else []
        pixels = ["uint8"] if self._normalises or not floats else []
        made = slot_type(self.engine, self.decoder, self.batch, kind)
        slots = [made(self.engine, self.batch) for _ in range(SLOTS)]
        for slot in slots:
            for dtype in (*floats, *pixels):
                slot.images(dtype)
        dtype = (*floats, *pixels)[0]
        slots[0].clear(dtype)
        count = waiting_chunks(self.columns, self.batch)
        block = columns.memory(self.engine, self.columns, count * self.batch)  # page-locked at once
        rows = [block[at * self.batch : (at + 1) * self.batch] for at in range(count)]
        slots[0].predict(dtype, rows[0], self.batch)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            file = ShardFile(folder, folder / "first", "first", "", self.columns, self.top)
            file.add(["0"], rows[0][:1].arrays, [None], {})
            file.commit()
        return {made: slots}, rows

    @property
    def is_of_rows(self) -> bool:
        """Whether the network gives one row of numbers for an image, as classifiers do."""
        return self.engine.form.is_of_rows

    @property
    def _normalises(self) -> bool:
        if self._preprocess is None:
            return False
        return self._preprocess.normalises or "uint8" not in self._reads

    @property
    def _reads(self) -> list[str]:
        """What images the network reads."""
        network = self.engine.network
        if isinstance(network, Model):
            return [network.base.inputs[0].dtype]
        return ["uint8", "float32"]

    def _batch(self, named: int | None) -> int:
        network = self.engine.network
        if columns.is_a_file(self.engine.form):
            if named not in (None, 1):
                raise expected("--batch", "1, for a file is one row", named)
            return 1
        if isinstance(network, Model) and not network.any_batch:
            if named not in (None, network.batch):
                raise expected("--batch", f"{network.batch}, for which alone the model is", named)
            return network.batch
        if named is not None:
            return named
        image = int(np.prod(network.input_shape))
        if self._normalises:
            image *= 1 + 4  # the pixels, and float32 of them
        largest = max(image, columns.row_bytes(self.columns))
        return min(
            self.engine.batch_size(None, 1 << 20),
            max(CHUNK_BYTES[self.engine.device.kind] // largest, 1),
        )

    def hello(self) -> Message:
        """Returns the engine's properties, for the parent's settings and checks."""
        engine = self.engine
        network, choice = engine.network, engine.choice
        described = environment.describe(engine.device)
        for name in ("pyarrow", "pillow", "simplejpeg", "onnx"):
            described["versions"][name] = environment.package_version(name)
        return {
            "event": "hello",
            "host": platform.node(),
            "pid": os.getpid(),
            "network": network.name,
            "model_sha256": model_hash(engine),
            "weights": str(engine.weights_source),
            "device": engine.device.name,
            "device_kind": engine.device.kind,
            "device_name": engine.device.model,
            "variant": choice.variant,
            "reduction": choice.reduction,
            "dtype": engine.dtype,
            "threads": engine.threads,
            "batch": self.batch,
            "classes": network.classes,
            "numbers": self.columns[0].title if self.is_of_rows else columns.OUTPUTS,
            "columns": None if self.is_of_rows else [one.to_dict() for one in self.columns],
            "shape": list(network.input_shape),
            "inputs": columns.inputs_of(engine.form),
            "a_file": columns.is_a_file(engine.form),
            "takes_images": engine.form.is_of_images and engine.form.in_parts,
            "reads": self._reads,
            "normalises": self._normalises,
            "preprocess": None if self._preprocess is None else str(self._preprocess),
            "preprocess_source": self._preprocess_source,
            "decoder": self.decoder.name,
            "environment": described,
        }

    def open(self, message: Message) -> None:
        """Opens an output folder: ``folder``, ``temporary``, ``run`` and ``texts``; see :class:`Settings`."""
        self.settings = Settings(
            Path(message["folder"]), Path(message["temporary"]), message["run"], self.batch,
            self.top, self.wanted, self.columns, message["texts"], self.names,
        )  # fmt: skip
        self.pipeline = Pipeline(
            self.engine, self.decoder, self.settings, self._slots, self._rows, self._computed,
            self._ended,
        )  # fmt: skip
        self._cpu_before = process_time()
        threading.Thread(target=self._beat, args=(threading.Event(),), daemon=True).start()

    def handle(self, message: Message) -> None:
        """Executes a command: ``open``, ``run`` a shard, or ``measure`` a stage."""
        command = message["command"]
        if command == "open":
            self.open(message)
        elif command == "run":
            self.pipeline.submit(Shard(**message["shard"]), message["attempt"])
        elif command == "measure":
            threading.Thread(target=self._measure, args=(message,), daemon=True).start()

    def _measure(self, message: Message) -> None:
        shards = [Shard(**shard) for shard in message["shards"]]
        with self.pipeline.memory(shards[0]) as (slots, rows):
            bench = stage_limits.Bench(
                self.engine, self.decoder, self.settings, slots, rows, shards, message["attempt"]
            )
            found = stage_limits.measure(bench, message["stage"], message["seconds"])
        self._emit({"event": "measured", "stage": message["stage"], **found})

    def _computed(self, shard: Shard) -> None:
        self._emit({"event": "computed", "shard": shard.index})

    def _ended(
        self,
        shard: Shard,
        record: Record | None,
        failed: tuple[str, str] | None,
        seconds: float,
    ) -> None:
        if record is not None:
            event = {"event": "done", **vars(record)}
        else:
            event = {"event": "failed", "kind": failed[0], "message": failed[1]}
        # Counts first: whoever hears of the shard has heard of its images.
        self._emit(self.counts())
        self._emit({**event, "shard": shard.index, "seconds": seconds})

    def counts(self) -> Message:
        """Returns images, errors and work of the stages so far."""
        pipeline = self.pipeline
        return {
            "event": "beat",
            "images": pipeline.images,
            "errors": pipeline.errors,
            "stages": {name: vars(stage).copy() for name, stage in pipeline.stages.items()},
            "peak_bytes": memory.peak_bytes(),
            "cpu_s": process_time() - self._cpu_before,
        }

    def _beat(self, never: threading.Event) -> None:
        while not never.wait(BEAT_S):
            self._emit(self.counts())


def model_of(config: Message) -> Workload:
    """Returns the model of a configuration, with open sizes as the first file of inputs has them.

    Dimension 0 stays open where inputs and outputs have rows then; else a file is one row.

    Raises:
        InputError: the model or the file is at fault.
        UnsupportedError: the model cannot give a row for each row, nor one for a file.
    """
    shapes = {name: tuple(shape) for name, shape in config.get("input_shape") or []}
    constants, like = dict(config.get("constants") or []), config.get("like")
    found = of_model(config["model"], shapes, constants, preprocess=config["preprocess"])
    if not like or shapes:
        check_form(found.network, like is not None)
        return found
    sizes = model_inputs.shapes_in(found.network, like)
    rows = {name: (None, *shape[1:]) for name, shape in sizes.items() if shape}
    for given in ({}, rows):
        with suppress(CnnEngineError):
            found = of_model(config["model"], given, constants)
            check_form(found.network, False)
            return found
    found = of_model(config["model"], sizes, constants)
    check_form(found.network, True)
    return found


def check_form(model: Model, whole: bool) -> None:
    """Checks that sizes are known, and that each row of the inputs gives a row of every output.

    Args:
        whole: whether a file of inputs may be one row.

    Raises:
        UnsupportedError: they are not.
    """
    form = form_of(model, model.base)
    if form.sizes_of is not None:
        name, shape = model.inputs[0].name, list(model.inputs[0].shape)
        says = "--preprocess letterbox=640" if form.is_of_images else "a .npz of inputs"
        wanted = f"sizes, by {says} or --input-shape {name}=..."
        raise UnsupportedError(f"{model.name}: expected {wanted}, found {shape}")
    for value in () if whole else (*form.inputs, *form.outputs):
        if value.name not in form.rows:
            wanted = f"a row for each image, or a .npz of all inputs for each row, for {value.name}"
            raise UnsupportedError(f"{model.name}: expected {wanted}, found {list(value.shape)}")


def model_hash(engine: Engine) -> str:
    """Returns a SHA-256 of the computation: the graph and its weights."""
    digest = hashlib.sha256()
    network = engine.network
    if isinstance(network, Model):
        for node in network.base.nodes:
            digest.update(repr((node.op, node.inputs, node.outputs)).encode())
        constants = network.base.constants
    else:
        digest.update(repr((network.input_shape, network.layers)).encode())
        digest.update(repr((network.scale, network.offset)).encode())
        constants = engine.weights
    for name in sorted(constants):
        array = np.ascontiguousarray(constants[name])
        digest.update(repr((name, array.shape, array.dtype.str)).encode())
        digest.update(memoryview(array).cast("B") if array.size else b"")
    return digest.hexdigest()


def main() -> int:
    """Serves the process that started this one, until it closes standard input."""
    # What libraries print must not get between events.
    events = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    lock = ForkSafeLock()

    def emit(event: Message) -> None:
        line = json.dumps(event) + "\n"
        try:
            with lock:
                events.write(line)
                events.flush()
        except (OSError, ValueError):
            os._exit(1)  # nobody listens any more

    sys.setswitchinterval(SWITCH_S)
    config = json.loads(sys.stdin.readline() or "null")
    if config is None:
        return 0
    try:
        worker = Worker(config, emit)
        hello = worker.hello()
    except CnnEngineError as error:
        emit({"event": "error", "message": str(error)})
        return 2
    except MemoryError as error:
        emit({"event": "error", "message": f"out of memory: {error}"})
        return 2
    emit(hello)
    for line in sys.stdin:
        worker.handle(json.loads(line))
    # Threads are in the middle of shards that nobody waits for: their files have no names yet.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
