"""Passes of a network over the caller's arrays: ``predict`` and ``run``, and memory for their arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .. import _cpu
from ..devices import arrays
from ..errors import expected
from ..graph.dims import Sizes, holds_dims
from ..graph.form import Form
from ..graph.model import Model
from ..graph.network import Network
from ..graph.specialization import FoundError
from ..plan.plan import Plan
from ..plan.schedule import GPU_PART, Schedule
from ..workload import Samples
from . import arguments, conversion
from .device_images import DeviceImages
from .host_memory import HostMemory, samples
from .outputs import Outputs, allocate_outputs, fits_output, outputs_by_name
from .plan_cache import Shelf
from .plan_runner import Plans

address_of = _cpu.address_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Predictor:
    """Runs a network whose plans are made when they are first asked for; the base of :class:`.engine.Engine`.

    Args:
        network: with its form on this device.
        data_mode: of passes over arrays in host memory.
        plans: what runs.
        schedule: how many images go in a pass.
    """

    def __init__(
        self,
        network: Network | Model,
        form: Form,
        device: Any,
        data_mode: str,
        plans: Plans,
        schedule: Schedule,
    ) -> None:
        self.network, self.form, self.device, self.data_mode = network, form, device, data_mode
        self._plans, self._schedule = plans, schedule
        self._ready = plans.ready  # of predict's usual calls
        self._memory = HostMemory(device, form)
        self._reader: Any = None  # of files, for device_images()
        #: Images per pass, where the model is for so many alone.
        self._only_batch = form.only_batch
        #: Of a network with one output of float32, the shape of an image's part of it.
        self._row: tuple[int, ...] | None = None
        if len(form.outputs) == 1 and form.outputs[0].dtype == "float32":
            row = form.rows.get(form.outputs[0].name)
            self._row = None if holds_dims(row) else row

    @overload
    def predict(
        self,
        images: NDArray[Any],
        batch: int | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]: ...

    @overload
    def predict(self, images: Any, batch: int | None = None, out: Any = None) -> Any: ...

    def predict(self, images: Any, batch: int | None = None, out: Any = None) -> Any:
        """Returns the outputs of a network with one input for ``images``.

        Of a classifier these are probabilities where it ends in a softmax (:attr:`gives_probabilities`), else
        logits as they are.

        Args:
            images: an array as the network's input is, C-contiguous; dimension 0 is the images. Lists, other
                number types and images of Pillow's are converted first: :mod:`.conversion`. Images
                [N, C, H, W] are uint8 pixels, which are normalised, or float32 input, which is taken as it
                is. A NumPy array, copied to a GPU fastest from :meth:`empty_images`; with ``auto``,
                ``resident`` or ``stream`` data also an array of the engine's CUDA device (CuPy, PyTorch,
                DLPack ...), which stays there.
            batch: images per pass, all where there are fewer; None: by rule, as many as are fast. All go in
                one pass where an output has no row per image.
            out: memory beside the images, to be filled: an array; of several outputs a mapping from all
                names, or a sequence. None: new arrays.

        Returns:
            the output, of any rank, such as float32 [N, classes]; of several outputs :class:`Outputs`: a
            sequence in the network's order, which names index too. ``out`` where that is given. NumPy arrays
            are complete; for an array on the device they are of its library (else CuPy's), queued on the
            caller's current stream and not waited for. With ``out``, nothing is allocated from the second
            call alike on. Any call may be captured into a CUDA graph, on any stream. The graph then has
            memory of its own, and keeps it and the weights until it is destroyed, also where the engine is
            closed before; instances of one graph share it.

        Raises:
            InputError: the images or ``out`` do not fit the network, or a batch does not fit in memory.
            UnsupportedError: the network has several inputs: see :meth:`run`. Or float16 has no room for a
                node's results: of arrays on the device, those of an earlier call; see :meth:`check_overflow`.
        """
        if batch is None:  # a call like one before: nothing is left to check
            if type(images) is np.ndarray:
                if (rows := self._again(images, out)) is not None:
                    return rows
            elif self._ready and (glance := arrays.glance(images, out)) is not None:
                key, source, target = glance
                # None are remembered of a stream that is captured: what a graph uses is the graph's own.
                shelf = self._ready.get((key, self.device.stream_id(key[1])))
                if shelf is not None:
                    rows = out
                    if out is None:
                        rows, target = arrays.empty_rows(images, self._row)
                    if shelf.run(source, target):
                        return rows
        try:
            return self._predict(images, batch, out)
        except FoundError as error:
            return self._in_stages(error).predict(images, batch, out)

    def _in_stages(self, error: FoundError) -> Predictor:
        """Returns what runs the network at sizes at which it finds numbers; raises where nothing does."""
        raise error

    def _again(self, images: np.ndarray, out: Any = None) -> np.ndarray | None:
        """Returns the rows of a call like one before, whose checks would cost a third of a small pass.

        None: there was none, and nothing is done.
        """
        if not images.flags.c_contiguous:
            return None
        source = address_of(images)
        shelf = self._ready.get((images.shape, images.dtype, self._plans.is_pinned(source)))
        if shelf is None or not (out is None or fits_output(out, images, self._row)):
            return None
        rows = np.empty((len(images), *self._row), np.float32) if out is None else out
        return rows if shelf.run(source, address_of(rows)) else None

    def _remember(self, images: arrays.View, count: int, most: int, shelf: Shelf | None) -> None:
        """Lets the next call on such images in host memory go straight to the plans of one pass over all.

        Args:
            most: images that go in one pass by rule.
        """
        whole = 0 < count <= most and self._only_batch in (None, count)
        if (
            whole
            and self._row is not None
            and not self._plans.overlaps(count, images.dtype == np.uint8)
        ):
            pinned = self._plans.is_pinned(images.address)
            self._plans.remember((images.shape, images.dtype, pinned), shelf)

    def _predict(self, images: Any, batch: int | None, out: Any) -> Any:
        """Returns what :meth:`predict` does, of a call like none before."""
        images = conversion.images_of(self.form, self.network, images)
        found, count, sizes = arguments.images_of(self.form, images)
        pixels = found.dtype == np.uint8
        by_rule = batch is None
        batch = self._only_batch or arguments.batch_size(batch, count)
        schedule = self._schedule
        if sizes is not None:
            schedule = schedule.scaled(found.nbytes, count, found.dtype.itemsize)
        if self.form.in_parts and sizes is None:
            shapes = {name: (count, *row) for name, row in self.form.rows.items()}
        elif self.form.in_parts:
            shapes = self._plans.shapes(sizes, pixels)
        else:  # what images share is of all of them
            if batch is not None and batch < count:
                raise expected(
                    "batch",
                    f"{count}, for an output of {self.network.name} has no row per image",
                    batch,
                )
            batch = count if self._only_batch is None else batch
            shapes = self._plans.shapes(batch if sizes is None else sizes, pixels)
        given = outputs_by_name(self.form, out)
        rooms = allocate_outputs(self.form, given, shapes, [found])
        targets = list(rooms.values())
        if found.device != arrays.CPU:
            size = batch or schedule.batch_on_device(count)
            shelf = self._plans.run_on_device([found], targets, count, size, sizes=sizes)
            glance = arrays.glance(images, out) if self._row is not None else None
            if shelf is not None and batch is None and count <= size and glance is not None:
                self._plans.remember((glance[0], self.device.stream_id(glance[0][1])), shelf)
        elif not self.form.in_parts:
            self._plans.run([found], targets, batch if sizes is None else sizes, pixels, None)
        else:
            size = batch or schedule.batch(count, pixels)
            shelf = self._plans.run_on_host([found], targets, count, size, sizes)
            if by_rule:
                self._remember(found, count, size, shelf)
        if out is not None:
            return out
        found_arrays = {name: room.array for name, room in rooms.items()}
        return Outputs(found_arrays) if len(rooms) != 1 else next(iter(found_arrays.values()))

    def run(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        out: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Runs any graph once.

        Args:
            inputs: name -> array of the input's type and shape, C-contiguous; lists and other number types
                are converted first, as of :meth:`predict`. Where the graph is for any
                batch, dimension 0 is the batch, the same in all inputs that have one. All are in host memory,
                or all on the engine's CUDA device (CuPy, PyTorch, DLPack ...) as :meth:`predict` takes them.
            outputs: names of those that are wanted; None: all.
            out: output -> memory beside the inputs that is filled with it; others are new arrays.

        Returns:
            name -> array, for every output that is wanted. Arrays of the host are complete; those of a device
            are queued on the caller's current stream, which may be captured, as of :meth:`predict`.

        Raises:
            InputError: an array does not fit the graph, or the batch not in memory.
            UnsupportedError: as :meth:`predict`.
        """
        if self._ready and outputs is None and out is None and type(inputs) is dict:
            images = inputs.get(self.form.inputs[0].name) if len(inputs) == 1 else None
            if type(images) is np.ndarray and (rows := self._again(images)) is not None:
                return {self.form.outputs[0].name: rows}
        try:
            return self._run(inputs, outputs, out)
        except FoundError as error:
            return self._in_stages(error).run(inputs, outputs, out)

    def _run(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None,
        out: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Returns what :meth:`run` does, at sizes at which the network finds no numbers while it runs."""
        arguments.check_mappings(inputs, out)
        form, given = self.form, out or {}
        inputs = conversion.inputs_of(form, inputs)
        first = str(getattr(inputs.get(form.inputs[0].name), "dtype", "")) if form.inputs else ""
        pixels = first.removeprefix("torch.") == "uint8" and self.form.reads_pixels
        found, batch = arguments.of_graph(form, inputs, pixels)
        wanted = arguments.wanted_outputs(form, outputs, given)
        shapes = self._plans.shapes(batch, pixels)
        rooms = allocate_outputs(form, given, shapes, found, wanted)
        empty = batch == 0 if isinstance(batch, int) else batch.is_empty
        if not (empty and all(0 in room.shape for room in rooms.values())):
            targets = list(rooms.values())
            if found and found[0].device != arrays.CPU:
                sizes = batch if isinstance(batch, Sizes) else None
                count = batch if sizes is None else 1
                self._plans.run_on_device(found, targets, count, count, wanted, sizes)
            else:
                shelf = self._plans.run(found, targets, batch, pixels, wanted)
                if len(found) == 1 and form.in_parts and isinstance(batch, int):
                    self._remember(found[0], batch, self._schedule.batch(batch, pixels), shelf)
        names = rooms if outputs is None else outputs
        return {n: given[n] if n in given else rooms[n].array for n in names}

    def output_arrays(self, sizes: Sizes) -> list[tuple[str, tuple[int, ...], np.dtype]]:
        """Returns the name, shape and type of every output of :meth:`run_sized`."""
        shapes = self._plans.shapes(
            sizes if sizes.numbers else self.form.batch, self.form.reads_pixels
        )
        return [(v.name, shapes[v.name], np.dtype(v.dtype)) for v in self.form.outputs]

    def run_sized(self, addresses: Sequence[int], sizes: Sizes) -> Shelf:
        """Runs a pass that has sizes beyond the shapes of its inputs; returns its shelf.

        Args:
            addresses: of all inputs, then of all outputs: memory of the host, of their types and shapes.
        """
        size = sizes if sizes.numbers else self.form.batch
        return self._plans.run_at(addresses, size, self.form.reads_pixels)

    def _all_of(self, images: np.ndarray | Samples) -> dict[str, np.ndarray]:
        """Returns every output for images in host memory."""
        if not isinstance(images, Samples) or len(self.form.inputs) == 1:
            given = images.arrays.values() if isinstance(images, Samples) else [images]
            found = self.predict(*given)
            return found.to_dict() if isinstance(found, Outputs) else {"": found}
        count, form = len(images), self.form
        batch = self.batch_size(None, count, images.dtype) if form.in_parts else max(count, 1)
        rooms = self.empty_outputs(count, batch)
        for first in range(0, count, batch):
            some, room = images[first : first + batch], rooms[first : first + batch]
            self._run_whole(some, room)
        return rooms.arrays

    def _run_whole(self, images: Samples, rooms: Samples) -> None:
        """Runs one pass over images in host memory."""
        views = [
            [
                arrays.view(name, array, dtype=array.dtype.name)
                for name, array in side.arrays.items()
            ]
            for side in (images, rooms)
        ]
        self._plans.run(*views, len(images), images.dtype == np.uint8, None)

    def plan(
        self,
        batch: int,
        dtype: np.dtype,
        pinned: tuple[bool, bool] = (False, False),
    ) -> Plan:
        """Returns the steps of a pass over ``batch`` images in host memory, built when first asked for.

        ``pinned`` says whether images and probabilities are page-locked: they are copied where they are then.
        """
        return self._plans.lend(batch, dtype == np.uint8, pinned)

    def plan_at(
        self,
        inputs: int | Sequence[int],
        outputs: int | Sequence[int],
        batch: int,
        dtype: np.dtype,
    ) -> Plan:
        """Returns the plan for ``batch`` images, bound to these addresses, for the caller's use.

        It stays the caller's, apart from what :meth:`predict` uses, until the engine is closed.

        Args:
            inputs, outputs: addresses of all arrays, or of the only one, in the network's order.
            dtype: of the first input.
        """
        addresses = tuple(
            address
            for side in (inputs, outputs)
            for address in ((side,) if isinstance(side, int) else side)
        )
        pixels = dtype == np.uint8
        pinned = False, False
        if len(addresses) > 1:
            pinned = self._plans.pinned(batch, pixels, addresses[0], addresses[-1])
        plan = self.plan(batch, dtype, pinned)
        plan.bind(*addresses)
        return plan

    def check_images(self, images: Any) -> arrays.View:
        """Checks the array of the network's only input.

        Raises:
            InputError: it is of another type or shape, or there are several inputs.
        """
        return arguments.images_of(self.form, images)[0]

    def batch_size(self, batch: int | None, images: int, dtype: Any = np.uint8) -> int:
        """Returns how many of ``images`` are in a pass: all where ``batch`` is more; None: by rule.

        Raises:
            InputError: it is no whole number of at least 1.
        """
        if self._only_batch:
            return self._only_batch
        named = arguments.batch_size(batch, images)
        return named or self._schedule.batch(images, np.dtype(dtype) == np.uint8)

    def data_mode_of(self, batch: int, dtype: Any = np.uint8) -> str:
        """Returns the data mode of a pass over ``batch`` images in host memory, which ``auto`` stands for."""
        if self.data_mode != "auto":
            return self.data_mode
        return (
            "stream" if self._schedule.overlaps(batch, np.dtype(dtype) == np.uint8) else "resident"
        )

    def keep_sizes(self) -> None:
        """Keeps plans for passes of several sizes, for which a GPU has a part of its memory."""
        pool = self._plans.pool
        pool.kept_bytes = max(pool.kept_bytes, self._schedule.memory // GPU_PART)

    def samples(self, inputs: Mapping[str, Any]) -> Samples:
        """Returns arrays in host memory, by name, as the images of one or several passes.

        Dimension 0 are the images where the network has a batch: any number, or of a network for so many
        alone a multiple of these.

        Raises:
            InputError: they do not fit the network, or hold what is not finite.
        """
        return samples(self.form, inputs)

    def page_locked(self, images: Samples) -> Samples:
        """Returns a copy of inputs in page-locked memory, from which they are copied to a GPU fastest."""
        return self._memory.page_locked(images)

    def empty_images(self, count: int, dtype: Any = np.uint8) -> np.ndarray:
        """Returns memory for ``count`` images [N, C, H, W], page-locked on CUDA, to be filled."""
        return self._memory.empty((count, *self.network.input_shape), dtype)

    def empty_probabilities(self, count: int) -> np.ndarray:
        """Returns memory for ``count`` rows of outputs, page-locked on CUDA."""
        return self._memory.empty((count, self.network.classes), np.float32)

    def empty_outputs(self, count: int, batch: int) -> Samples:
        """Returns memory for outputs of passes over ``batch`` of ``count`` images, page-locked on CUDA."""
        shared = {} if self.form.in_parts else self._plans.shapes(batch, self.form.reads_pixels)
        return self._memory.outputs(count, shared)

    def takes_files(self, count: int, dtype: Any = np.uint8) -> bool:
        """Whether there is :meth:`device_images`: passes over so many go in chunks, one kernel per chunk."""
        pixels = np.dtype(dtype) == np.uint8
        return self._schedule.overlaps(count, pixels) and not self._schedule.activation_bytes

    def device_images(self, count: int, dtype: Any = np.uint8) -> DeviceImages:
        """Returns memory of the GPU for ``count`` images, into which files are read past the host's memory.

        Raises:
            InputError: the engine has none; see :meth:`takes_files`.
        """
        if not self.takes_files(count, dtype):
            raise expected("images", "passes in chunks, by one kernel", f"{count} images")
        if self._reader is None:
            self._reader = self.device.file_reader(self.threads)
        shape, dtype = (count, *self.network.input_shape), np.dtype(dtype)
        buffer = self.device.allocate(math.prod(shape) * dtype.itemsize)
        return DeviceImages(self._plans, self._reader, buffer, shape, dtype)
