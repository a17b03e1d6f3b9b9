"""The engine: a network with its weights on a device, ready to predict and to be profiled."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from . import arrays, devices, environment, fused, reference, timing, variants, workload
from . import threads as thread_counts
from . import weights as weight_files
from .devices.cpu import CpuDevice
from .errors import InputError, UnsupportedError, expected
from .network import Network
from .plan import Placement, Plan, Program, build, build_stream
from .result import Accuracy, Check, Latency, Phases, Result
from .workload import Dataset, Workload

#: Images a pass unless said: enough to occupy a CPU's threads, small enough for any memory.
DEFAULT_BATCH = 100

#: Images that the check against the float64 reference takes: about a second of NumPy.
CHECK_IMAGES = 256

#: The largest error of a probability that a correct variant may have, by data type.
#: float32: sums of up to 500 products of numbers near 1, through three layers and a softmax, stay within
#: some 1e-6 of float64 in any order of summation.
#: float16, bfloat16: weights and activations are rounded to 11 or 8 bits at every layer.
TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}

#: What the data mode ``stream`` tries, as parts of a batch, to find the best size of a chunk.
CHUNKS_A_BATCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
SMALLEST_CHUNK = 256


class Engine:
    """Runs one network on one device in one variant.

    An engine belongs to one thread at a time.

    Args:
        network: a workload's name, a :class:`~cnn_engine.workload.Workload`, or a
            :class:`~cnn_engine.network.Network`.
        weights: ``"default"`` (the workload's own), ``"random"``, a path (``.safetensors`` or a ConvNetJS
            folder), or a mapping from parameter names to arrays.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        variant: ``"auto"``, or one of :data:`cnn_engine.variants.VARIANTS`.
        reduction: let several lanes share one output's sum; None: off, or what ``"auto"`` finds fastest.
        dtype: ``"float32"``, or what the variant ``fused`` computes in besides.
        data_mode: ``"resident"``, or on CUDA ``"transfer"``, ``"managed"`` or ``"stream"``.
        threads: of CPU work; None: as many as CPUs.
        chunk: images that move at a time in the data mode ``stream``; None: found by measurement.

    Raises:
        InputError: an argument or a weights file is at fault.
        UnsupportedError: the device or this installation lacks what is asked for.
    """

    def __init__(
        self,
        network: str | Workload | Network = "cifar10",
        *,
        weights: str | Path | Mapping[str, np.ndarray] = "default",
        device: str = "auto",
        variant: str = "auto",
        reduction: bool | None = None,
        dtype: str = "float32",
        data_mode: str = "resident",
        threads: int | None = None,
        chunk: int | None = None,
    ) -> None:
        start = perf_counter()
        if isinstance(network, str):
            network = workload.get(network)
        self.workload = network if isinstance(network, Workload) else None
        self.network: Network = network.network if isinstance(network, Workload) else network
        if len(self.network.infos[-1].output_shape) != 1:
            raise InputError(f"{self.network.name}: expected a last layer with one row of outputs")
        self._classes = self.network.classes
        self.threads = thread_counts.check(threads, "--threads")
        self.device = devices.select(device)
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise expected("--chunk", "a whole number of at least 1", chunk)
        if chunk is not None and data_mode != "stream":
            raise expected("--chunk", "the data mode stream", data_mode)
        self.chunk = chunk
        self.dtype = dtype
        self.data_mode = data_mode
        self.phases = Phases(create_network_s=perf_counter() - start)

        start = perf_counter()
        self.weights, self.weights_source = self._read_weights(weights)
        self.choice = variants.choose(
            self.device.kind, variant, reduction, dtype, data_mode,
            lambda: fused.why_not(self.network, self.weights, self.device, dtype),
            times_layers=self.workload is not None and self.workload.times_layers,
        )  # fmt: skip
        # Chunks on several streams are each computed as resident data is.
        mode = "resident" if data_mode == "stream" else data_mode
        self._program: Program | None = self._load(Placement(self.device, mode, self.threads))
        self.phases.load_parameters_s = perf_counter() - start
        self._plans: dict[tuple, Plan] = {}
        self._chunks: dict[tuple[int, bool], int] = {}
        self._ready: dict[tuple[tuple[int, ...], np.dtype], Plan] = {}  # of predict's usual calls

    def _load(self, placement: Placement) -> Program:
        """Brings the weights to where the variant needs them."""
        network, weights, device = self.network, self.weights, self.device
        if not self.choice.layered:
            made = fused.create(network, weights, device, self.dtype)
            # One that goes on in layers after its kernel has memory of its own: one for each stream.
            shared = getattr(made, "whole", True)

            def compiled() -> Any:
                return made if shared else fused.create(network, weights, device, self.dtype)

            return Program(network, {}, compiled, placement, self.choice)
        places = {placement.place_of(layer.kind) for layer in network.layers}
        buffers = {
            place: {
                name: (device if place == "cuda" else CpuDevice()).upload(value)
                for name, value in weights.items()
            }
            for place in places
        }
        return Program(network, buffers, lambda: None, placement, self.choice)

    def _read_weights(
        self, weights: str | Path | Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], str]:
        if isinstance(weights, Mapping):
            return self.network.check_weights(dict(weights), "weights"), "given as arrays"
        if weights == "random":
            return self.network.random_weights(), "random"
        if weights != "default":
            return weight_files.read(weights, self.network), str(weights)
        if self.workload is None or self.workload.default_weights is None:
            raise InputError(
                f"--weights: expected a path or random, found default, but {self.network.name} "
                "comes without weights"
            )
        return weight_files.read(self.workload.default_weights, self.network), "default"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the engine's memory; it cannot be used afterwards."""
        self._plans.clear()
        self._ready.clear()
        self._program = None

    def plan(
        self,
        batch: int,
        dtype: np.dtype,
        on_device: bool = False,
        pinned: tuple[bool, bool] = (False, False),
    ) -> Plan:
        """Returns the steps of a pass over ``batch`` images, built when first asked for.

        ``pinned`` says whether images and probabilities are page-locked, which ``stream`` uses.
        """
        pixels = dtype == np.uint8
        key = (batch, pixels, on_device, pinned)
        if key not in self._plans:
            if self._program is None:
                raise InputError("engine: expected an open engine, found a closed one")
            start = perf_counter()
            if self.data_mode == "stream" and not on_device:
                chunk = self.chunk or self._best_chunk(batch, pixels)
                self._plans[key] = build_stream(self._program, batch, pixels, chunk, pinned)
            else:
                self._plans[key] = build(self._program, batch, pixels, on_device)
            seconds = perf_counter() - start
            self.phases.create_outputs_s = (self.phases.create_outputs_s or 0) + seconds
        return self._plans[key]

    def plan_at(self, images: int, probabilities: int, batch: int, dtype: np.dtype) -> Plan:
        """Returns the plan for ``batch`` images at these addresses, bound to them."""
        pinned = (False, False)
        if self.data_mode == "stream":
            pinned = (self.device.is_pinned(images), self.device.is_pinned(probabilities))
        plan = self.plan(batch, dtype, pinned=pinned)
        plan.bind(images, probabilities)
        return plan

    def _best_chunk(self, batch: int, pixels: bool) -> int:
        """Returns the size of chunk with the fastest pass over ``batch`` random images."""
        key = (batch, pixels)
        if key not in self._chunks:
            generator = np.random.default_rng(0)
            images = self.empty_images(batch, np.uint8 if pixels else np.float32)
            images.reshape(-1).view(np.uint8)[:] = generator.integers(
                0, 128, images.nbytes, np.uint8
            )
            probabilities = self.empty_probabilities(batch)
            addresses = _address(images), _address(probabilities)
            times = {}
            for parts in CHUNKS_A_BATCH:
                chunk = -(-batch // parts)
                if chunk in times or (parts > 1 and chunk < SMALLEST_CHUNK):
                    continue
                plan = build_stream(self._program, batch, pixels, chunk, (True, True))
                plan.bind(*addresses)
                samples = []
                for _ in range(4):
                    start = perf_counter()
                    plan.run()
                    samples.append(perf_counter() - start)
                times[chunk] = min(samples[1:])
            self._chunks[key] = min(times, key=times.get)
        return self._chunks[key]

    def empty_images(self, count: int, dtype: Any = np.uint8) -> np.ndarray:
        """Returns memory for ``count`` images [N, C, H, W], page-locked on CUDA, to be filled."""
        return self._empty((count, *self.network.input_shape), dtype)

    def empty_probabilities(self, count: int) -> np.ndarray:
        """Returns memory for ``count`` rows of probabilities, page-locked on CUDA."""
        return self._empty((count, self.network.classes), np.float32)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if self.device.kind == "cuda":
            return self.device.empty_pinned(shape, dtype)
        return np.empty(shape, dtype)

    def _check_images(self, images: Any) -> arrays.View:
        """Looks at ``images``; raises InputError unless they are of the network's shape."""
        kind = getattr(images, "dtype", None)
        dtype = "uint8" if str(kind).removeprefix("torch.") == "uint8" else "float32"
        found = arrays.view("images", images, dtype=dtype, ndim=4)
        if found.shape[1:] != tuple(self.network.input_shape):
            wanted = ", ".join(map(str, self.network.input_shape))
            raise InputError(f"images: expected shape [N, {wanted}], found {list(found.shape)}")
        return found

    def predict(self, images: Any, batch: int | None = None) -> Any:
        """Returns the probability of every class for every image.

        Args:
            images: [N, C, H, W], C-contiguous: uint8 pixels, which are normalised, or float32 input, which
                is taken as it is. A NumPy array; with ``resident`` data also an array of the engine's
                CUDA device, which stays there.
            batch: images a pass; None: 100, or all for an array on the device.

        Returns:
            float32 [N, classes]: a NumPy array, complete; or for an array on the device a CuPy array,
            queued behind the caller's current stream and not waited for.

        Raises:
            InputError: the images do not fit the network, or a batch does not fit in memory.
        """
        if batch is None and type(images) is np.ndarray and images.flags.c_contiguous:
            # A shape and type that were looked at before, in one pass: nothing is left to check, and at
            # batch 1 the checks would cost a third of the pass.
            plan = self._ready.get((images.shape, images.dtype))
            if plan is not None:
                probabilities = np.empty((plan.batch, self._classes), np.float32)
                plan.bind(_address(images), _address(probabilities))
                plan.run()
                return probabilities
        found = self._check_images(images)
        count = found.shape[0]
        if found.device != arrays.CPU:
            return self._predict_on_device(found, _check_batch(batch, count) or count)
        probabilities = (
            self.empty_probabilities(count)
            if self.data_mode == "stream"
            else (np.empty((count, self.network.classes), np.float32))
        )
        size = _check_batch(batch, count) or min(DEFAULT_BATCH, max(count, 1))
        for plan, _ in timing.batches(self, found.array, probabilities, size):
            plan.run()
        if batch is None and self.data_mode != "stream" and 0 < count <= size:
            self._ready[found.shape, found.dtype] = plan
        return probabilities

    def _predict_on_device(self, images: arrays.View, batch: int) -> Any:
        if (
            self.data_mode not in ("resident", "stream")
            or self.device.name != f"cuda:{images.device}"
        ):
            raise UnsupportedError(
                f"images: expected a NumPy array for the device {self.device.name} in the data mode "
                f"{self.data_mode}, found an array on cuda:{images.device}"
            )
        probabilities = arrays.empty_beside(images, (images.shape[0], self.network.classes))
        caller = arrays.current_stream(images)
        self.device.wait_for(caller)
        image_bytes = images.nbytes // max(images.shape[0], 1)
        with self.device.context:
            for first in range(0, images.shape[0], max(batch, 1)):
                plan = self.plan(min(batch, images.shape[0] - first), images.dtype, on_device=True)
                row = first * self.network.classes * 4
                plan.bind(images.address + first * image_bytes, probabilities.address + row)
                plan.run()
        self.device.make_wait(caller)
        return probabilities.array

    def check(self, images: np.ndarray) -> Check:
        """Compares the probabilities of ``images`` with the float64 reference's."""
        found = self.predict(images)
        wanted = reference.forward(self.network, self.weights, images)
        with np.errstate(invalid="ignore"):
            difference = np.abs(found - wanted)
        return Check(
            reference="NumPy float64",
            images=len(images),
            max_abs_diff=float(difference.max(initial=0.0)),
            top1_agreement=float(np.mean(found.argmax(1) == wanted.argmax(1)))
            if len(images)
            else 1.0,
            tolerance=TOLERANCE[self.dtype],
        )

    def profile(
        self,
        images: np.ndarray | Dataset,
        labels: np.ndarray | None = None,
        *,
        batch: int | None = None,
        warmup: int = 1,
        iterations: int | None = None,
        duration_s: float | None = None,
        percentiles: tuple[float, ...] = (50.0, 90.0, 99.0),
        check: bool = True,
        probabilities: np.ndarray | None = None,
        progress: Any = None,
    ) -> Result:
        """Checks the variant against the reference, then times it: whole passes, and every step.

        Args:
            images: uint8 or float32 [N, C, H, W] in host memory, or a data set with its labels.
            labels: [N], or None where they are not known.
            batch: images a pass; None: 100.
            warmup: passes before the first that counts.
            iterations: how often all images are run in the run that times whole passes.
            duration_s: instead of ``iterations``, repeat until so many seconds have passed. With neither,
                repeat until the median is known within 1 %, for at most five seconds.
            percentiles: of the latency, from 0 to 100.
            check: whether to compare with the float64 reference first. When that fails, nothing is timed.
            probabilities: float32 [N, classes], filled with the result; None: not kept.
            progress: an object with ``start(what, images)``, ``advance(images)`` and ``stop()``, or None.

        Returns:
            The result. Ctrl-C ends the timing early and keeps what was measured (``interrupted``).

        Raises:
            InputError: an argument is at fault.
        """
        name, source, notes = "array", "given as arrays", []
        if isinstance(images, Dataset):
            dataset = images
            images, labels = dataset.images, dataset.labels if labels is None else labels
            name, source = dataset.name, dataset.source
            notes = [dataset.note] if dataset.note else []
        found = self._check_images(images)
        if found.device != arrays.CPU:
            raise InputError("images: expected host memory to profile, found a CUDA device's")
        count = found.shape[0]
        images = found.array
        if labels is not None and np.shape(labels) != (count,):
            raise InputError(f"labels: expected shape [{count}], found {list(np.shape(labels))}")
        batch = _check_batch(batch, count) or min(DEFAULT_BATCH, max(count, 1))
        counts = [("--warmup", warmup, 0)]
        if iterations is not None:
            counts.append(("--iterations", iterations, 1))
        for option, value, lowest in counts:
            if not isinstance(value, int) or value < lowest:
                raise expected(option, f"a whole number of at least {lowest}", value)
        if duration_s is not None and not 0 < duration_s < float("inf"):
            raise expected("--duration", "a positive number of seconds", duration_s)
        if not all(0 <= p <= 100 for p in percentiles):
            raise expected("--percentiles", "numbers from 0 to 100", percentiles)
        if probabilities is None:
            probabilities = np.empty((count, self.network.classes), np.float32)
        else:
            arrays.view(
                "probabilities", probabilities, shape=(count, self.network.classes), writable=True
            )

        if self.device.note:
            notes.append(self.device.note)
        result = Result(
            command=shlex.join(sys.orig_argv),
            environment=environment.describe(self.device),
            network=self.network.name,
            weights=self.weights_source,
            dataset={"name": name, "source": source, "images": count},
            device=self.device.name,
            device_name=self.device.model,
            variant=self.choice.variant,
            variant_reason=self.choice.reason,
            reduction=self.choice.reduction,
            dtype=self.dtype,
            data_mode=self.data_mode,
            batch=batch,
            threads=self.threads,
            phases=self.phases,
            notes=notes,
        )
        load_average = environment.host_load()
        if check:
            result.check = self.check(images[:CHECK_IMAGES])
            if not result.check.passed:
                return result
        self._time(
            result,
            images,
            probabilities,
            batch,
            warmup,
            iterations,
            duration_s,
            percentiles,
            progress,
        )
        result.environment.update(environment.state(self.device, load_average))
        if labels is not None and result.images_done:
            start = perf_counter()
            done = result.images_done
            correct = int(np.sum(probabilities[:done].argmax(axis=1) == labels[:done]))
            result.accuracy = Accuracy(correct, done)
            self.phases.accuracy_s = perf_counter() - start
        if self.workload is not None and self.workload.report_lines is not None:
            result.extra_lines = self.workload.report_lines(result)
        return result

    def _time(
        self,
        result,
        images,
        probabilities,
        batch,
        warmup,
        iterations,
        duration_s,
        percentiles,
        progress,
    ) -> None:
        """Fills ``result`` with the times of passes and of steps."""
        if len(images) == 0:
            return
        for size in {batch, len(images) % batch or batch}:  # memory before time
            self.plan_at(_address(images), _address(probabilities), size, images.dtype)
        progress = progress or _NoProgress()
        progress.start("passes", len(images) * (iterations or 1))
        passes = timing.time_passes(
            self, images, probabilities, batch, warmup=warmup, iterations=iterations,
            duration_s=duration_s, progress=progress.advance,
        )  # fmt: skip
        self.phases.forward_s = passes.forward_s
        result.iterations, result.images_done = passes.iterations, passes.images_done
        result.interrupted, result.stop = passes.interrupted, passes.stop
        if passes.seconds_total > 0:
            result.throughput_images_per_s = passes.images_total / passes.seconds_total
        if passes.full_s:
            samples = [seconds * 1e3 for seconds in passes.full_s]
            result.latency = Latency(samples, tuple(float(p) for p in percentiles))
        if not passes.interrupted:
            progress.start("layers", len(images))
            steps = timing.time_layers(self, images, probabilities, batch, progress.advance)
            if steps.hidden is not None:
                result.notes.append(steps.hidden.describe())
            result.layers, result.copies = steps.layers, steps.copies
            result.timed_pass = steps.timed_pass if steps.timed_pass.calls else None
            result.timeline, result.timeline_total = steps.timeline, steps.timeline_total
            result.interrupted = steps.interrupted
        progress.stop()


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _check_batch(batch: int | None, images: int) -> int | None:
    if batch is None:
        return None
    most = max(images, 1)
    if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= most:
        raise expected("--batch", f"a whole number from 1 to {most} (the images)", batch)
    return batch


class _NoProgress:
    """Shows nothing."""

    def start(self, what: str, images: int) -> None: ...
    def advance(self, images: int) -> None: ...
    def stop(self) -> None: ...
