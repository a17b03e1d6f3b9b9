"""The engine: a network with its weights on a device, ready to predict and to be profiled."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from . import arrays, devices, environment, reference, timing, variants, workload
from . import threads as thread_counts
from . import weights as weight_files
from .devices.cpu import CpuDevice
from .errors import InputError, UnsupportedError, expected
from .network import Network
from .plan import Placement, Plan, build
from .result import Accuracy, Check, Latency, Phases, Result
from .workload import Dataset, Workload

#: Images a pass unless said: enough to occupy a CPU's threads, small enough for any memory.
DEFAULT_BATCH = 100

#: Images that the check against the float64 reference takes: about a second of NumPy.
CHECK_IMAGES = 256

#: The largest error of a probability that a correct variant may have, by data type.
#: float32: sums of up to 500 products of numbers near 1, through three layers and a softmax, stay within
#: some 1e-6 of float64 in any order of summation.
TOLERANCE = {"float32": 1e-5}


class Engine:
    """Runs one network on one device in one variant.

    An engine belongs to one thread at a time.

    Args:
        network: a workload's name, a :class:`~cnn_engine.workload.Workload`, or a
            :class:`~cnn_engine.network.Network`.
        weights: ``"default"`` (the workload's own), ``"random"``, a path (``.safetensors`` or a ConvNetJS
            folder), or a mapping from parameter names to arrays.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        variant: ``"auto"``, ``"if"`` or ``"pad"``.
        reduction: let several lanes share one output's sum; None: off, or what ``"auto"`` finds fastest.
        dtype: ``"float32"``.
        data_mode: ``"resident"``, or on CUDA ``"transfer"`` or ``"managed"``.
        threads: of CPU work; None: as many as CPUs.

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
    ) -> None:
        start = perf_counter()
        if isinstance(network, str):
            network = workload.get(network)
        self.workload = network if isinstance(network, Workload) else None
        self.network: Network = network.network if isinstance(network, Workload) else network
        if len(self.network.infos[-1].output_shape) != 1:
            raise InputError(f"{self.network.name}: expected a last layer with one row of outputs")
        self.threads = thread_counts.check(threads, "--threads")
        self.device = devices.select(device)
        variants.check_data_mode(self.device.kind, data_mode)
        self.choice = variants.choose(self.network, self.device.kind, variant, reduction, dtype)
        self.dtype = dtype
        self.data_mode = data_mode
        self.phases = Phases(create_network_s=perf_counter() - start)

        start = perf_counter()
        self.weights, self.weights_source = self._read_weights(weights)
        self._placement = Placement(self.device, data_mode, self.threads)
        places = {self._placement.place_of(layer.kind) for layer in self.network.layers}
        self._weight_buffers = {
            place: {
                name: (self.device if place == "cuda" else CpuDevice()).upload(value)
                for name, value in self.weights.items()
            }
            for place in places
        }
        self.phases.load_parameters_s = perf_counter() - start
        self._plans: dict[tuple[int, bool, bool], Plan] = {}

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
        self._weight_buffers.clear()

    def plan(self, batch: int, dtype: np.dtype, on_device: bool = False) -> Plan:
        """Returns the steps of a pass over ``batch`` images, built when first asked for."""
        key = (batch, dtype == np.uint8, on_device)
        if key not in self._plans:
            if not self._weight_buffers:
                raise InputError("engine: expected an open engine, found a closed one")
            start = perf_counter()
            self._plans[key] = build(
                self.network, self._weight_buffers, self._placement, self.choice.variant,
                self.choice.reduction, batch, key[1], on_device,
            )  # fmt: skip
            self.phases.create_outputs_s = (
                (self.phases.create_outputs_s or 0) + perf_counter() - start
            )
        return self._plans[key]

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
        found = self._check_images(images)
        count = found.shape[0]
        if found.device != arrays.CPU:
            return self._predict_on_device(found, _check_batch(batch, count) or count)
        probabilities = np.empty((count, self.network.classes), np.float32)
        size = _check_batch(batch, count) or min(DEFAULT_BATCH, max(count, 1))
        for plan, _ in timing.batches(self, found.array, probabilities, size):
            plan.run()
        return probabilities

    def _predict_on_device(self, images: arrays.View, batch: int) -> Any:
        if self.data_mode != "resident" or self.device.name != f"cuda:{images.device}":
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
        iterations: int = 1,
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
            duration_s: instead of ``iterations``, repeat until so many seconds have passed.
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
        for option, value, lowest in (("--warmup", warmup, 0), ("--iterations", iterations, 1)):
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
            self.plan(size, images.dtype)
        progress = progress or _NoProgress()
        progress.start("passes", len(images) * (1 if duration_s else iterations))
        passes = timing.time_passes(
            self, images, probabilities, batch, warmup=warmup, iterations=iterations,
            duration_s=duration_s, progress=progress.advance,
        )  # fmt: skip
        self.phases.forward_s = passes.forward_s
        result.iterations, result.images_done = passes.iterations, passes.images_done
        result.interrupted = passes.interrupted
        if passes.seconds_total > 0:
            result.throughput_images_per_s = passes.images_total / passes.seconds_total
        if passes.full_s:
            samples = [seconds * 1e3 for seconds in passes.full_s]
            result.latency = Latency(samples, tuple(float(p) for p in percentiles))
        if not passes.interrupted:
            progress.start("layers", len(images))
            scratch = np.empty_like(probabilities)
            steps = timing.time_layers(self, images, scratch, batch, progress.advance)
            result.layers, result.copies = steps.layers, steps.copies
            result.timeline, result.timeline_total = steps.timeline, steps.timeline_total
            result.interrupted = steps.interrupted
        progress.stop()


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
