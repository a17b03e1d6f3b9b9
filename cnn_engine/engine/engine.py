"""The engine: a network with its weights on a device, ready to predict and to be profiled."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import devices, workload
from ..devices import threads as thread_counts
from ..errors import InputError, UnsupportedError, expected
from ..floating_point import usual_mode
from ..graph.form import form_of
from ..graph.graph import Graph, Node, Value
from ..graph.model import Model
from ..graph.network import Network
from ..graph.probabilities import gives_probabilities
from ..graph.specialization import FoundError
from ..graph.stages import StagedModel
from ..kernels import Kernel, select
from ..locks import ForkSafeLock
from ..lower import fused_network, user_kernels
from ..lower.lowering import Program
from ..lower.placement import Placement
from ..plan.plan import Plan
from ..plan.schedule import Schedule
from ..workload import Dataset, Samples, Workload
from .check import Check
from .check import check as compare
from .loading import find, read_weights
from .phases import Phases
from .plan_cache import plan_bytes
from .plan_runner import Plans
from .predictor import Predictor

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ..measure.result import Result


class Engine(Predictor):
    """Runs one network on one device in one variant.

    :meth:`predict` may be called from several threads at once: each pass has memory of its own, and the
    interpreter's lock is released while kernels run. :meth:`profile` waits for a profile in another thread.

    Args:
        network: a workload's name, a :class:`~cnn_engine.workload.Workload`, a
            :class:`~cnn_engine.graph.network.Network`, a :class:`~cnn_engine.graph.graph.Graph`, or an ONNX
            model: its path, its bytes or an ``onnx.ModelProto``.
        weights: ``"default"`` (the workload's own), ``"random"``, a path (``.safetensors`` or a ConvNetJS
            folder), or a mapping from parameter names to arrays.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"openacc"`` or ``"openacc:host"``: the
            operators in OpenACC directives, on a GPU or on the host.
        variant: ``"auto"``, or one of :data:`cnn_engine.kernels.select.VARIANTS`.
        reduction: let several lanes share one output's sum; None: off, or what ``"auto"`` finds fastest.
        dtype: ``"float32"``, or what the variant ``fused`` computes in besides. What a model's convolutions
            and linear layers multiply can be rounded, with ``auto``, to ``"bfloat16"`` on a CPU that
            multiplies it, and to ``"tf32"``, ``"float16"`` or ``"bfloat16"`` on CUDA from compute capability
            8.0 on. In float16 and bfloat16 what kernels hand on to each other lies in memory so as well;
            sums, inputs and outputs stay float32.
        data_mode: ``"auto"``: resident, with copies that overlap with kernels in passes over many images;
            ``"resident"``; or on CUDA ``"transfer"``, ``"managed"`` or ``"stream"``.
        threads: CPU threads; None: as many as CPUs.
        chunk: images that move at a time in the data mode ``stream``; None: by rule.
        input_shape: of an ONNX model, input -> its shape, where the model leaves dimensions open beside the
            batch; a dimension of None is as the file has it.
        constants: of an ONNX model, input -> its value, of inputs that are settings: no inputs of the network
            then. See :func:`cnn_engine.load`.
        kernels: kernels of a user's own in the place of the engine's: as ``--kernel`` takes them
            (``"my.cu"``, ``"conv2:my.cu"``) or :class:`cnn_engine.Kernel`, each for all nodes of its
            operator that it can run; or a mapping from nodes or operators to either.
        tune: measure the best few kernels of each node on this device, when a plan for a batch is first
            built, and keep what was found in the user's cache; False: the kernels that the engine's model of
            their costs names, always the same.
        batch_invariant: give an image the same bits in every batch, at every place and among any others, on
            CUDA too, where it takes longer: see docs/explanation/numerics.md. On a CPU that is always so.

    Raises:
        InputError: an argument or a weights file is at fault.
        UnsupportedError: the device or this installation lacks what is asked for.
    """

    @usual_mode()  # constants are folded
    def __init__(
        self,
        network: str | os.PathLike | bytes | Workload | Network | Graph | Any = "cifar10",
        *,
        weights: str | Path | Mapping[str, np.ndarray] = "default",
        device: str = "auto",
        variant: str = "auto",
        reduction: bool | None = None,
        dtype: str = "float32",
        data_mode: str = "auto",
        threads: int | None = None,
        chunk: int | None = None,
        input_shape: Mapping[str, Sequence[int | None]] | None = None,
        constants: Mapping[str, Any] | None = None,
        kernels: Sequence[str | Kernel] | Mapping[str, str | Kernel] = (),
        tune: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        start = perf_counter()
        self._options = {
            "device": device, "variant": variant, "reduction": reduction, "dtype": dtype,
            "data_mode": data_mode, "threads": threads, "chunk": chunk, "kernels": kernels,
            "tune": tune, "batch_invariant": batch_invariant,
        }  # fmt: skip
        network = find(network, input_shape, constants)
        if isinstance(network, StagedModel):
            from . import staged  # which stands on this module

            self.__class__ = staged.StagedEngine
            self.begin(network)
            return
        self.workload = network if isinstance(network, Workload) else None
        self.network: Network | Model = (
            network.network if isinstance(network, Workload) else network
        )
        is_model = isinstance(self.network, Model)
        if not is_model and len(self.network.infos[-1].output_shape) != 1:
            raise InputError(f"{self.network.name}: expected a last layer with one row of outputs")
        self.threads = thread_counts.check(threads, "threads")
        self.device = devices.select(device)
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise expected("chunk", "a whole number of at least 1", chunk)
        if chunk is not None and data_mode != "stream":
            raise expected("chunk", "the data mode stream", data_mode)
        self.chunk = chunk
        self.dtype = dtype
        #: Node, or operator -> the kernel of a user's own.
        self.kernels = user_kernels.own_kernels(kernels)
        self.batch_invariant = bool(batch_invariant)
        self._check_batch_invariant(tune)
        if data_mode == "auto" and self.device.kind != "cuda":
            data_mode = "resident"
        if self.device.kind == "openacc":
            self.device.check_data_mode(data_mode)
        self.data_mode = data_mode
        self.phases = Phases(create_network_s=perf_counter() - start)

        start = perf_counter()
        self.weights, self.weights_source = read_weights(
            weights, self.network, self.workload and self.workload.default_weights
        )
        #: What the network takes and gives.
        self.form = form_of(self.network, self._base)
        if data_mode == "stream" and not self.form.is_images_to_rows:
            wanted = (
                "any but stream, which splits images into chunks, for a network of other arrays"
            )
            raise expected("data_mode", wanted, "stream")
        program, schedule = self._lowered(variant, reduction, data_mode, tune)
        self.phases.load_parameters_s = perf_counter() - start
        plans = Plans(program, schedule, chunk, self.phases, self.form)
        super().__init__(self.network, self.form, self.device, data_mode, plans, schedule)
        self._kernel_names: str | None = None  # by repr
        self._profiling = ForkSafeLock()
        self._staging = ForkSafeLock()
        self._staged: Engine | None = None  # for sizes at which the network finds numbers
        _log.info(
            "%s on %s: variant %s, %s, weights %s",
            self.network.name, self.device.name, self.choice.variant, dtype, self.weights_source,
        )  # fmt: skip

    def _lowered(
        self, variant: str, reduction: bool | None, data_mode: str, tune: bool
    ) -> tuple[Program, Schedule]:
        """Chooses how the network runs on the device; returns its program, loaded, and its schedule.

        Raises:
            UnsupportedError: the device or this installation lacks what is asked for.
        """
        is_model, dtype = isinstance(self.network, Model), self.dtype
        self._fused_layers: int | None = None  # that one kernel runs, where the choice is fused
        # Chunks on several streams are each computed as resident data is.
        mode = "resident" if data_mode in ("auto", "stream") else data_mode
        rounds = mode == "resident" and not (reduction or self.kernels)
        with self.device.context:  # what is asked of the current device
            saved = getattr(self.network, "saved", None)
            self.choice = select.choose(
                self.device.kind, variant, reduction, dtype,
                "resident" if data_mode == "auto" else data_mode, self._why_not_fused,
                select.layered_dtypes(self.device, rounds) if is_model else ("float32",), self._why_slower,
            ) if saved is None else saved.choice  # fmt: skip
            placement = Placement(self.device, mode, self.threads)
            chooses = self.choice.layered and self.choice.automatic and mode == "resident"
            self._tune = tune
            self._tuner = None
            if tune and chooses:
                from . import autotune  # and what it imports, where it is asked for

                self._tuner = autotune.Tuner(self.device, dtype)
            program = Program(
                partial(_graph_of, self.network, self.weights), placement, self.choice, dtype, fuses=is_model,
                first=(self.network.batch, self.form.reads_pixels) if is_model else (1, True),
                own=self.kernels, tuner=self._tuner, fused_layers=self._fused_layers, saved=saved,
                batch_invariant=self.batch_invariant,
            )  # fmt: skip
            if program.channels_last and saved is None:
                others = "channels_last and winograd where weights are constants"
                if self.device.kind == "cuda":
                    others = "channels_last on tensor cores where weights are constants"
                self.choice = replace(self.choice, reason=f"{self.choice.reason}; {others}")
            program.load()
            schedule = Schedule.of(
                self._base, self.network.batch if is_model else 1, program.covered, self.device,
                data_mode, self.threads, not self.choice.layered,
            )  # fmt: skip
        return program, schedule

    @classmethod
    def from_torch(cls, module: Any, example: Any, **options: Any) -> Engine:
        """Returns the engine of a PyTorch module, in its evaluation mode.

        The module is exported as ``cnn-engine export`` does, and is left as it was.

        Args:
            module: a ``torch.nn.Module`` with one input.
            example: a tensor as the module takes it, such as [1, 3, 224, 224]: its shape counts, and its
                dimension 0 is the images, of which the engine takes any number.
            options: of :class:`Engine`.

        Raises:
            InputError: PyTorch is not installed, or cannot export the module; says why.
            UnsupportedError: the engine lacks some of its operators.
        """
        from ..export import of_module  # it stands on the engine, and needs PyTorch

        return cls(of_module(module, example), **options)

    def _graph(self, batch: int, pixels: bool) -> Graph:
        return _graph_of(self.network, self.weights, batch, pixels)

    @property
    def _base(self) -> Graph:
        """The graph of a pass over as many images as a model names, or one image's pixels."""
        return self.network.base if isinstance(self.network, Model) else self._graph(1, True)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs of :meth:`run`, in order: ``name``, ``dtype`` and ``shape`` of each.

        A dimension is a number, or a :class:`~cnn_engine.graph.dims.Dim` where it is open, which prints as
        the name that it has in the file, such as ``batch``.
        """
        return self.network.inputs

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The outputs of :meth:`run`, in order; open dimensions are expressions of the inputs'."""
        return self.network.outputs

    @property
    def gives_probabilities(self) -> bool:
        """Whether :meth:`predict` returns probabilities: the network ends in a softmax over classes."""
        saved = getattr(self.network, "saved", None)
        return gives_probabilities(self._base) if saved is None else saved.gives_probabilities

    def _check_batch_invariant(self, tune: bool) -> None:
        """Refuses what an engine with the same bits in every batch cannot have."""
        if not self.batch_invariant:
            return
        if self.device.kind == "openacc":
            raise UnsupportedError(
                f"batch_invariant: expected a CPU or a CUDA device, found {self.device.name}"
            )
        for called, given in (("tune", tune), ("kernels", bool(self.kernels))):
            if given and self.device.kind == "cuda":
                raise UnsupportedError(
                    f"batch_invariant: expected no {called}, which may sum in another order"
                )

    def _why_not_fused(self) -> str | None:
        if self.batch_invariant and self.device.kind == "cuda":
            return "batch_invariant needs kernels of single nodes"
        if self.kernels:
            return "kernels of your own run nodes by themselves"
        try:
            self._fused_layers = fused_network.longest(self._base, self.dtype, self.device)
        except UnsupportedError as error:
            return str(error)
        return None

    def _why_slower(self) -> str | None:
        assert self._fused_layers is not None
        return fused_network.why_slower(self._base, self._fused_layers, self.device)

    def __repr__(self) -> str:
        closed = ", closed" if self._plans.closed else ""
        return (
            f"<Engine of {self.network.name} on {self.device.name}: {self._runs()}, "
            f"{self.dtype}, data mode {self.data_mode}, {self.threads} threads{closed}>"
        )

    def _runs(self) -> str:
        """Returns the variant, or of ``auto`` the kernels of what multiplies, as reports name them."""
        choice = self.choice
        if not (choice.automatic and choice.layered):
            return f"{choice.variant}{' with reduction' if choice.reduction else ''}"
        if self._tuner is not None:
            return "auto, tuned"
        if self._kernel_names is None and not self._plans.closed:
            self._kernel_names = ", ".join(self._plans.open().gemm_kernels())
        return f"auto: {self._kernel_names}" if self._kernel_names else "auto"

    def __reduce__(self) -> tuple:
        """Pickles the description and the weights; an equal engine is made of them, in any process."""
        self._plans.open()
        network: Any = self.network
        if self.workload is not None and self.workload.name in workload.names():
            network = self.workload.name
        weights = "default" if isinstance(network, Model) else self.weights
        return _engine_of, (network, weights, self.weights_source, self._options)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        try:
            self.close()
        except UnsupportedError:
            if kind is None:  # else the error below says so
                raise

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the engine to a file from which :func:`cnn_engine.load_engine` has it back at once.

        The file is in safetensors' format: the rewritten graph, its weights, and these packed for the kernels
        of this device; no code. It is for this version of the engine and devices of this kind.

        Raises:
            InputError: the file cannot be written.
            UnsupportedError: the engine is of a network of layers, or has kernels of its user, or ``tune``.
        """
        from . import saved

        saved.save(self, self._plans.open(), path)

    def close(self) -> None:
        """Frees the engine's memory; it cannot be used afterwards.

        Passes that other threads have begun end as usual, and free what they use; calls after that raise
        InputError. What calls on arrays of the device have queued is waited for; CUDA graphs that captured a
        call keep what they use.

        Raises:
            UnsupportedError: as :meth:`check_overflow`, when all is freed.
        """
        self._reader = None
        if self._staged is not None:
            self._staged.close()
        self._plans.close()

    def _in_stages(self, error: FoundError) -> Engine:
        """Returns the engine for sizes at which the network finds numbers while it runs."""
        with self._staging:
            if self._staged is None:
                if error.graph is None:
                    raise error
                self._staged = Engine(error.graph(), **self._options)
            return self._staged

    def check_overflow(self) -> None:
        """Waits for calls on arrays of the device, and raises if float16 had no room for their results.

        Such a call does not wait for its pass, and so cannot tell: ask here before its results are used. The
        next call alike says so too, of an earlier one, before it does anything; so does :meth:`close`. Calls
        on NumPy arrays tell by themselves, other types than float16 have room.

        Raises:
            UnsupportedError: a node's results did not fit, in any call since this was last asked.
        """
        self._plans.check_overflow()

    def memory(self, plan: Plan) -> dict[str, int]:
        """Returns the bytes of a plan: of activations at their peak, and of all weights."""
        weights = sum(array.nbytes for array in self._base.constants.values())
        return {"peak_activation_bytes": plan_bytes(plan), "weights_bytes": weights}

    def own_kernels(
        self, batch: int, dtype: Any = np.uint8
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Returns which nodes user kernels run in a pass, as JSON and as sentences."""
        if not self.kernels:
            return [], []
        placed = self._plans.open().placed(batch, np.dtype(dtype) == np.uint8)
        return user_kernels.describe(self.kernels, placed)

    def tuned(self, batch: int, dtype: Any = np.uint8) -> tuple[list[dict[str, Any]], list[str]]:
        """Returns the changes that tuning made in a pass, as JSON and as sentences."""
        if not self._tune:
            return [], []
        if self._tuner is None:
            return [], [f"tuning: nothing to choose in {self.choice.variant}, {self.data_mode}"]
        program, pixels = self._plans.open(), np.dtype(dtype) == np.uint8
        found = self._tuner.tuned(program, program.laid(batch, pixels), batch, pixels)
        from . import autotune

        return autotune.describe(found), [*self._tuner.notes, autotune.summary(found)]

    def check(self, images: Any) -> Check:
        """Compares all that ``images`` give with the float64 reference's.

        Args:
            images: as :meth:`predict` takes them, or :meth:`samples`.
        """
        given = images if isinstance(images, Samples) else self.check_images(images).array
        return compare(
            self._all_of,
            self._graph_at,
            given,
            self._computes,
            self._only_batch,
            self.form.in_parts,
        )

    def _graph_at(self, batch: int, pixels: bool) -> Graph:
        return self._graph(self.form.size(batch), pixels)

    def _computes(self, node: Node) -> str:
        """What the products of a node are rounded to."""
        kernel = self.kernels.get(node.name) or self.kernels.get(node.op.kind)
        return self.dtype if kernel is None else kernel.computes[0]

    def profile(
        self,
        images: np.ndarray | Samples | Mapping[str, np.ndarray] | Dataset,
        labels: np.ndarray | None = None,
        *,
        batch: int | None = None,
        warmup: int = 1,
        iterations: int | None = None,
        duration_s: float | None = None,
        percentiles: tuple[float, ...] = (50.0, 90.0, 99.0),
        check: bool = True,
        probabilities: np.ndarray | Samples | None = None,
        progress: Any = None,
        records: bool = True,
    ) -> Result:
        """Checks the variant against the reference, then times it: whole passes, and every step.

        Args:
            images: uint8 or float32 [N, C, H, W] in host memory, or a data set with its labels; of any
                network its inputs by name, as :meth:`samples` takes them.
            labels: [N], or None where they are not known.
            batch: images per pass, all where there are fewer; None: as :meth:`predict` takes them.
            warmup: passes before the first that counts.
            iterations: how often all images are run in the run that times whole passes.
            duration_s: instead of ``iterations``, repeat until so many seconds have passed. With neither,
                repeat until the median of this run is known within 1 %, for at most five seconds.
            percentiles: of the latency, from 0 to 100.
            check: whether to compare with the float64 reference first. When that fails, nothing is timed.
            probabilities: float32 [N, classes], filled with the result; None: not kept. There may be rows for
                the rest of a data set as well (:attr:`Dataset.rest`). Of any network, :meth:`empty_outputs`.
            progress: an object with ``start(what, images)``, ``advance(images)`` and ``stop()``, or None.
            records: whether times of a CUDA device may be taken by activity records, after which later passes
                of the process may stay a little slower; else by events.

        Returns:
            The result. Ctrl-C ends the timing early and keeps what was measured (``interrupted``).

        Raises:
            InputError: an argument is at fault.
        """
        from ..measure import measurement  # it stands on the engine, and is loaded by who measures

        settings = measurement.Settings(warmup, iterations, duration_s, percentiles, check, records)
        progress = progress or measurement.NoProgress()
        with self._profiling, self.device.context:
            return measurement.profile(
                self, images, labels, batch, settings, probabilities, progress
            )


def _graph_of(network: Network | Model, weights: Any, batch: int, pixels: bool) -> Graph:
    return network.graph(batch, pixels, weights)


def _engine_of(
    network: Any, weights: str | dict[str, np.ndarray], source: str, options: dict[str, Any]
) -> Engine:
    engine = Engine(network, weights=weights, **options)
    engine.weights_source = source
    return engine
