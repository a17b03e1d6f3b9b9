"""A graph as the engine's users see it: images in, one row a image out, where it has that form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from ..errors import InputError, UnsupportedError
from . import passes
from .batches import Batches
from .dims import Dim
from .graph import Graph, Value
from .mapped import check


class Model:
    """A graph that was read from a file or built by hand.

    Attributes:
        name: the graph's.
        base: the graph, simplified, for the batch that it was made for.
        notes: what simplifying did.
    """

    def __init__(self, graph: Graph) -> None:
        check(graph.constants.values())
        self.name = graph.name
        self._batches = Batches(partial(_simplified, graph))
        first = graph.batch if graph.batched else None
        self.base = _simplified(graph, None) if first is None else self._batches(first)

    @property
    def batch(self) -> int:
        """The batch that the graph was made for: of any kind where :attr:`any_batch`."""
        return self.base.inputs[0].shape[0] if self.base.inputs and self.base.inputs[0].shape else 1

    @property
    def any_batch(self) -> bool:
        """Whether the graph can be made for other batches."""
        return bool(self.base.batched)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs, with a :class:`~cnn_engine.graph.dims.Dim` where a dimension is open."""
        return self._open.inputs

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The outputs, likewise: expressions of the inputs' dimensions where these can be given."""
        return tuple(self._open.values[name] for name in self._open.outputs)

    @property
    def _open(self) -> Graph:
        symbolic = self._batches.symbolic if self.any_batch else None
        return self.base if symbolic is None else symbolic.graph

    @property
    def why_not_images(self) -> str | None:
        """Why this is no network from images to rows of numbers, or None."""
        inputs, outputs = self.base.inputs, self.base.outputs
        if len(inputs) != 1 or len(outputs) != 1:
            return f"expected one input and one output, found {len(inputs)} and {len(outputs)}"
        images, rows = inputs[0], self.base.values[outputs[0]]
        if len(images.shape) != 4 or images.dtype not in ("float32", "uint8"):
            return f"expected images [N, C, H, W], found {images.dtype} {list(images.shape)}"
        if len(rows.shape) != 2 or rows.dtype != "float32" or rows.shape[0] != images.shape[0]:
            return f"expected one row of float32 an image, found {rows.dtype} {list(rows.shape)}"
        return None

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says beside its graph: key -> text."""
        return self.base.metadata

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(channels, rows, columns) of one image; the first input's where there are several."""
        return self.base.inputs[0].shape[1:] if self.base.inputs else ()

    @property
    def classes(self) -> int:
        """The numbers that come out for one image."""
        return math.prod(self.base.values[self.base.outputs[0]].shape[1:])

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """All floating constants: name -> shape."""
        return {n: a.shape for n, a in self.base.constants.items() if a.dtype.kind == "f"}

    def flops(self, batch: int | None = None) -> int:
        """FLOPs of one pass."""
        graph = self.graph(batch)
        return sum(graph.cost_of(node).flops for node in graph.nodes)

    def graph(
        self,
        batch: int | Dim | None = None,
        pixels: bool = False,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> Graph:
        """Returns the graph for a batch; its constants are the same arrays for all.

        Args:
            batch: a number, or :data:`~cnn_engine.graph.dims.BATCH` for a graph that stands for many.

        Raises:
            InputError: the graph is for one batch alone, or reads no pixels.
        """
        images = self.base.inputs[0] if self.base.inputs else None
        if pixels and (images is None or images.dtype != "uint8"):
            raise InputError(
                f"images: expected {images.dtype if images else 'none'} for {self.name}, found uint8: "
                "the model has no place for pixels"
            )
        if batch is None or (not isinstance(batch, Dim) and batch == self.batch):
            return self.base
        if not self.any_batch:
            raise UnsupportedError(
                f"{self.name}: batch: expected {self.batch}, for which alone the model is made, "
                f"found {batch}"
            )
        return self._batches(batch)


def _simplified(graph: Graph, batch: int | Dim | None) -> Graph:
    graph = graph if batch is None else graph.with_batch(batch)
    return passes.share_constants(passes.simplify(graph))
