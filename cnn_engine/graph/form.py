"""The form of a network: its inputs and outputs, and which of them have a row per image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CnnEngineError
from .dims import Dim, Sizes, holds_dims
from .graph import Graph, Value
from .model import Model
from .network import Network


@dataclass(frozen=True)
class Form:
    """The inputs and outputs of a network, in its own order.

    Attributes:
        inputs, outputs: for :attr:`batch` images.
        batch: images of a pass, where the network is for so many alone; else of the graph that it came as.
        any_batch: whether it is for any number of images.
        made_for: what the graph calls the batch of such a pass.
        rows: input or output -> the shape of what it has for one image, where dimension 0 is the images.
        sizes_of: where other dimensions than the batch are open too, returns the sizes of all of them from
            the shapes of all inputs; else None. Rows then have symbols in the place of numbers.
        normalises: whether images may be pixels or the float32 that these are normalised to.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    batch: int
    any_batch: bool
    made_for: int
    rows: Mapping[str, tuple[int, ...]]
    sizes_of: Callable[[Mapping[str, Sequence[int]]], Sizes] | None = None
    normalises: bool = False

    @property
    def in_parts(self) -> bool:
        """Whether many images can go through in several passes: all that is read and made is by image."""
        return all(value.name in self.rows for value in (*self.inputs, *self.outputs))

    @property
    def only_batch(self) -> int | None:
        """Number of images of every pass, where the network fixes it; None: any number."""
        return None if self.any_batch else self.batch

    @property
    def reads_pixels(self) -> bool:
        """Whether the first input may be pixels."""
        return bool(self.inputs) and self.inputs[0].dtype == "uint8"

    @property
    def is_of_images(self) -> bool:
        """Whether there is one input, of images [N, C, H, W] as floats or pixels."""
        if len(self.inputs) != 1:
            return False
        (images,) = self.inputs
        is_of_images = len(images.shape) == 4 and images.dtype in ("float32", "uint8")
        return is_of_images and images.name in self.rows

    @property
    def is_images_to_rows(self) -> bool:
        """Whether one image input becomes one row of float32 per image, as classifiers do."""
        return self.is_of_images and self.is_of_rows and not self.sizes_of

    @property
    def is_of_rows(self) -> bool:
        """Whether there is one output, with a row of float32 per image, such as of classes."""
        if len(self.outputs) != 1 or not self.in_parts:
            return False
        (rows,) = self.outputs
        return len(rows.shape) == 2 and rows.dtype == "float32"

    def size(self, batch: int | Sizes) -> int | Sizes:
        """Returns the graph's batch for so many images: a network without a batch has one of 1 here."""
        if isinstance(batch, Sizes):
            return batch
        return self.made_for if not self.any_batch and batch == self.batch else batch


def form_of(network: Network | Model, base: Graph) -> Form:
    """Returns the form of ``network``, whose graph ``base`` is."""
    outputs = tuple(base.values[name] for name in base.outputs)
    values = (*base.inputs, *outputs)
    if isinstance(network, Network):
        rows = {value.name: value.shape[1:] for value in values}
        return Form(base.inputs, outputs, 1, True, 1, rows, normalises=True)
    batch = network.batch
    if len(base.sizes.numbers) > network.any_batch:  # others are open too
        rows = _open_rows(network)
        return Form(base.inputs, outputs, batch, network.any_batch, batch, rows, base.sizes_of)
    if network.any_batch:
        rows = {v.name: v.shape[1:] for v in base.inputs if v.name in base.batched}
        rows |= _by_batch(network, outputs, batch)
        return Form(base.inputs, outputs, batch, True, batch, rows)
    # Inputs have a batch where they agree on dimension 0; else a pass is one sample.
    leads = {value.shape[:1] for value in base.inputs}
    if leads != {(batch,)} or not batch:
        return Form(base.inputs, outputs, 1, False, batch, {})
    rows = {v.name: v.shape[1:] for v in values if v.shape[:1] == (batch,)}
    return Form(base.inputs, outputs, batch, False, batch, rows)


def _open_rows(network: Model) -> dict[str, tuple[Any, ...]]:
    """Returns the rows of inputs and outputs, of which other dimensions than the batch may be open."""
    if not network.any_batch:
        return {}
    symbol = network.base.sizes.batch
    count = Dim.symbol(symbol)
    return {
        value.name: value.shape[1:]
        for value in (*network.inputs, *network.outputs)
        if value.shape[:1] == (count,)
        and not any(isinstance(dim, Dim) and symbol in dim.symbols for dim in value.shape[1:])
    }


def _by_batch(network: Model, outputs: Sequence[Value], batch: int) -> dict[str, tuple[int, ...]]:
    """Returns the rows of outputs: where the batch is dimension 0, and in no other."""
    shapes = {value.name: value.shape for value in network.outputs}
    leads = [value.shape[0] for value in network.inputs if value.name in network.base.batched]
    count: Any = leads[0]
    if not any(map(holds_dims, shapes.values())):  # a graph that was made for numbers alone
        count = batch + 1
        try:
            other = network.graph(count)
        except CnnEngineError:  # and that its batch decides: of this one nothing else is known
            count, other = batch, network.base
        shapes = {value.name: other.values[value.name].shape for value in outputs}
    return {
        value.name: value.shape[1:]
        for value in outputs
        if (shape := shapes[value.name]) and shape[0] == count and shape[1:] == value.shape[1:]
    }
