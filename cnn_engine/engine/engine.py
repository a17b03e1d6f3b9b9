"""The engine: a network with its weights on a device, ready to predict and to be profiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from .. import devices, workload
from ..devices import arrays
from ..devices import threads as thread_counts
from ..devices.cpu import CpuDevice
from ..errors import InputError, UnsupportedError, expected
from ..graph.network import Network, operator_of
from ..io import weights as weight_files
from ..measure import measurement, timing
from ..measure.result import Check, Phases, Result
from ..operators import reference
from ..workload import Dataset, Workload
from . import fused, variants
from .plan import Placement, Plan, Program, build, build_stream

#: Images a pass unless said: enough to occupy a CPU's threads, small enough for any memory.
DEFAULT_BATCH = 100

#: The largest error of a probability that a correct variant may have, by data type.
#: float32: sums of up to 500 products of numbers near 1, through three layers and a softmax, stay within
#: some 1e-6 of float64 in any order of summation.
#: tf32, float16, bfloat16: weights and activations are rounded to 11, 11 or 8 bits at every layer. With
#: CIFAR-10's weights and bfloat16, exact sums of rounded values are up to 3.6e-2 off.
TOLERANCE = {"float32": 1e-5, "tf32": 2e-2, "float16": 2e-2, "bfloat16": 6e-2}

#: What the data mode ``stream`` tries, as parts of a batch, to find the best size of a chunk.
CHUNKS_A_BATCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
SMALLEST_CHUNK = 256

#: Plans that are kept for arrays on the device, one for each stream and batch; then all are built anew.
MOST_STREAM_PLANS = 64


class Engine:
    """Runs one network on one device in one variant.

    An engine belongs to one thread at a time.

    Args:
        network: a workload's name, a :class:`~cnn_engine.workload.Workload`, or a
            :class:`~cnn_engine.graph.network.Network`.
        weights: ``"default"`` (the workload's own), ``"random"``, a path (``.safetensors`` or a ConvNetJS
            folder), or a mapping from parameter names to arrays.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        variant: ``"auto"``, or one of :data:`cnn_engine.engine.variants.VARIANTS`.
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
        for layer in self.network.layers:
            operator_of(layer)
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
        self._ready: dict[tuple, Plan] = {}  # of predict's usual calls

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
        pinned: tuple[bool, bool] = (False, False),
    ) -> Plan:
        """Returns the steps of a pass over ``batch`` images in host memory, built when first asked for.

        ``pinned`` says whether images and probabilities are page-locked, which ``stream`` uses.
        """
        pixels = dtype == np.uint8
        key = (batch, pixels, pinned)
        if key not in self._plans:
            program = self._open()
            start = perf_counter()
            if self.data_mode == "stream":
                chunk = self.chunk or self._best_chunk(batch, pixels)
                self._plans[key] = build_stream(program, batch, pixels, chunk, pinned)
            else:
                self._plans[key] = build(program, batch, pixels)
            seconds = perf_counter() - start
            self.phases.create_outputs_s = (self.phases.create_outputs_s or 0) + seconds
        return self._plans[key]

    def _open(self) -> Program:
        if self._program is None:
            raise InputError("engine: expected an open engine, found a closed one")
        return self._program

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

    def check_images(self, images: Any) -> arrays.View:
        """Looks at ``images``; raises InputError unless they are of the network's shape."""
        kind = getattr(images, "dtype", None)
        dtype = "uint8" if str(kind).removeprefix("torch.") == "uint8" else "float32"
        found = arrays.view("images", images, dtype=dtype, ndim=4)
        if found.shape[1:] != tuple(self.network.input_shape):
            wanted = ", ".join(map(str, self.network.input_shape))
            raise InputError(f"images: expected shape [N, {wanted}], found {list(found.shape)}")
        return found

    def predict(self, images: Any, batch: int | None = None, out: Any = None) -> Any:
        """Returns the probability of every class for every image.

        Args:
            images: [N, C, H, W], C-contiguous: uint8 pixels, which are normalised, or float32 input, which
                is taken as it is. A NumPy array; with ``resident`` or ``stream`` data also an array of the
                engine's CUDA device (CuPy, PyTorch, DLPack ...), which stays there.
            batch: images a pass; None: 100, or all for an array on the device.
            out: float32 [N, classes] beside the images, to be filled; None: a new array.

        Returns:
            float32 [N, classes], or ``out``: a NumPy array, complete; or for an array on the device an array
            of its library (else CuPy's), queued on the caller's current stream and not waited for. With
            ``out``, nothing is allocated from the second call alike on, so that the caller may capture the
            call into a CUDA graph.

        Raises:
            InputError: the images or ``out`` do not fit the network, or a batch does not fit in memory.
        """
        if batch is None:  # a call like one before: nothing is left to check
            if type(images) is np.ndarray:
                # At batch 1 the checks would cost a third of the pass.
                plan = images.flags.c_contiguous and self._ready.get((images.shape, images.dtype))
                if plan:
                    probabilities = out
                    if out is None:
                        probabilities = np.empty((plan.batch, self._classes), np.float32)
                    if out is None or self._fits(out, images):
                        plan.bind(_address(images), _address(probabilities))
                        plan.run()
                        return probabilities
            elif self._ready and (glance := arrays.glance(images, out)) is not None:
                key, source, target = glance
                plan = self._ready.get(key)
                if plan is not None and self.device.is_current():
                    if out is None:
                        out, target = arrays.empty_rows(images, self._classes)
                    plan.bind(source, target)
                    plan.run()
                    return out
        found = self.check_images(images)
        count = found.shape[0]
        shape = (count, self._classes)
        if out is not None:
            target = arrays.view("out", out, shape=shape, writable=True)
            if target.device != found.device:
                raise expected("out", f"memory of {_where(found)}, as the images", _where(target))
            if target.overlaps(found):
                raise InputError("out: expected memory apart from the images, found an overlap")
        batch = _check_batch(batch, count)
        if found.device != arrays.CPU:
            target = arrays.empty_beside(found, shape) if out is None else target
            plan = self._predict_on_device(found, target, batch or count)
            glance = arrays.glance(images, out)
            if batch is None and plan is not None and glance is not None:
                self._ready[glance[0]] = plan
            return target.array if out is None else out
        if out is not None:
            probabilities = target.array
        elif self.data_mode == "stream":
            probabilities = self.empty_probabilities(count)
        else:
            probabilities = np.empty(shape, np.float32)
        size = self.batch_size(batch, count)
        for plan, _ in timing.batches(self, found.array, probabilities, size):
            plan.run()
        if batch is None and self.data_mode != "stream" and 0 < count <= size:
            self._ready[found.shape, found.dtype] = plan
        return probabilities if out is None else out

    def _fits(self, out: Any, images: np.ndarray) -> bool:
        """Whether ``out`` is what :meth:`predict` fills, as cheaply as that can be said for certain."""
        return (
            type(out) is np.ndarray
            and out.shape == (len(images), self._classes)
            and out.dtype == np.float32
            and out.flags.carray  # contiguous and writable
            and not np.may_share_memory(out, images)
        )

    def _predict_on_device(
        self, images: arrays.View, probabilities: arrays.View, batch: int
    ) -> Plan | None:
        """Queues the passes on the stream that the library of ``images`` works on; returns the last plan."""
        if (
            self.data_mode not in ("resident", "stream")
            or self.device.name != f"cuda:{images.device}"
        ):
            raise UnsupportedError(
                f"images: expected a NumPy array for the device {self.device.name} in the data mode "
                f"{self.data_mode}, found an array on cuda:{images.device}"
            )
        stream = arrays.current_stream(images)
        count = images.shape[0]
        image_bytes, row_bytes = images.nbytes // max(count, 1), 4 * self._classes
        plan = None
        with self.device.context:
            for first in range(0, count, max(batch, 1)):
                plan = self._plan_on(stream, min(batch, count - first), images.dtype)
                plan.bind(
                    images.address + first * image_bytes, probabilities.address + first * row_bytes
                )
                plan.run()
        return plan

    def _plan_on(self, stream: int, batch: int, dtype: np.dtype) -> Plan:
        """Returns the plan for images on the device, with all of its work on ``stream``.

        Memory between layers belongs to the stream, so that passes on two streams do not meet.
        """
        key = ("stream", stream, batch, dtype == np.uint8)
        if key not in self._plans:
            program = self._open()
            if sum(known[0] == "stream" for known in self._plans) >= MOST_STREAM_PLANS:
                for known in [known for known in self._plans if known[0] == "stream"]:
                    del self._plans[known]
                self._ready.clear()
            placement = replace(program.placement, device=self.device.on(stream))
            program = replace(program, placement=placement)
            self._plans[key] = build(program, batch, dtype == np.uint8, images_on_device=True)
        return self._plans[key]

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
        settings = measurement.Settings(warmup, iterations, duration_s, percentiles, check)
        progress = progress or measurement.NoProgress()
        return measurement.profile(self, images, labels, batch, settings, probabilities, progress)

    def batch_size(self, batch: int | None, images: int) -> int:
        """Returns how many of ``images`` are in a pass, None being the default.

        Raises:
            InputError: it is no number from 1 to ``images``.
        """
        return _check_batch(batch, images) or min(DEFAULT_BATCH, max(images, 1))


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _where(view: arrays.View) -> str:
    return "the CPU" if view.device == arrays.CPU else f"cuda:{view.device}"


def _check_batch(batch: int | None, images: int) -> int | None:
    if batch is None:
        return None
    most = max(images, 1)
    if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= most:
        raise expected("--batch", f"a whole number from 1 to {most} (the images)", batch)
    return batch
