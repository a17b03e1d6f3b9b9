"""A graph as the engine's users see it: images in, one row per image out, where it has that form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from ..errors import InputError, UnsupportedError
from . import passes
from .dims import Sizes
from .graph import Graph, Value
from .mapped import check
from .specialization import Specializations


class Model:
    """A graph that was read from a file or built by hand.

    Attributes:
        name: the graph's.
        base: the graph, simplified, for the batch that it was made for.
        notes: what simplifying did.
    """

    def __init__(self, graph: Graph) -> None:
        """Takes a graph.

        Raises:
            UnsupportedError: it finds numbers while it runs, and is here as an example has them.
        """
        if graph.found is not None:
            raise UnsupportedError(
                f"{graph.name}: expected a network whose sizes follow from its inputs', found one that finds "
                "some while it runs: call Engine.run or Engine.check, or fix an input that decides, as by "
                "--constant NAME=VALUE"
            )
        check(graph.constants.values())
        self.name = graph.name
        self._specializations = Specializations(partial(_simplified, graph))
        self.base = self._specializations(graph.sizes)

    @property
    def batch(self) -> int:
        """Batch that the graph was made for: of any kind where :attr:`any_batch`."""
        return self.base.inputs[0].shape[0] if self.base.inputs and self.base.inputs[0].shape else 1

    @property
    def any_batch(self) -> bool:
        """Whether the graph can be made for other batches."""
        return bool(self.base.batched)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs, with a :class:`~cnn_engine.graph.dims.Dim` where a dimension is open."""
        return self.base.open_inputs

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The outputs, likewise: expressions of the inputs' dimensions where these can be given."""
        variants = self._specializations.variants
        graph = variants[0].graph if variants else self.base
        return tuple(graph.values[name] for name in graph.outputs)

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
            return f"expected one row of float32 per image, found {rows.dtype} {list(rows.shape)}"
        return None

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of the file beside its graph: key -> text."""
        return self.base.metadata

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(channels, rows, columns) of one image; the first input's where there are several."""
        return self.base.inputs[0].shape[1:] if self.base.inputs else ()

    @property
    def classes(self) -> int:
        """Number of outputs of one image."""
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
        sizes: int | Sizes | None = None,
        pixels: bool = False,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> Graph:
        """Returns the graph for a size; its constants are the same arrays for all.

        Args:
            sizes: of all open dimensions, or a batch, the others being as in :attr:`base`. Symbolic ones give
                a graph that stands for many.

        Raises:
            InputError: the graph is for one batch alone, or reads no pixels.
        """
        images = self.base.inputs[0] if self.base.inputs else None
        if pixels and (images is None or images.dtype != "uint8"):
            raise InputError(
                f"images: expected {images.dtype if images else 'none'} for {self.name}, found uint8: "
                "the model has no place for pixels"
            )
        if sizes is None or (not isinstance(sizes, Sizes) and sizes == self.batch):
            return self.base
        if not isinstance(sizes, Sizes):
            if not self.any_batch:
                raise UnsupportedError(
                    f"{self.name}: batch: expected {self.batch}, for which alone the model is made, "
                    f"found {sizes}"
                )
            sizes = self.base.sizes.with_batch(sizes)
        return self.base if sizes == self.base.sizes else self._specializations(sizes)


def _simplified(graph: Graph, sizes: Sizes) -> Graph:
    return passes.share_constants(passes.simplify(graph.with_sizes(sizes)))
