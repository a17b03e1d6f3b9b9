"""Rewrites: plain functions from a graph to one that computes the same. Each notes what it did and why.

:func:`simplify` takes away what need not be run; :func:`fuse` marks what a kernel can do on its way;
:func:`lay_channels_last` does both for kernels over images whose channels lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..graph import Graph
from .canonical.activations import recognise_functions
from .canonical.batch_norm import fold_affine_after, fold_affine_before
from .canonical.concatenations import nest_concatenations
from .canonical.constants import drop_unused, fold_constants, share_constants
from .canonical.convolutions import plain_convolutions
from .canonical.identities import drop_identities, merge_shapes, reshape_ones
from .canonical.padding import fold_padding
from .canonical.transposes import compose_transposes, order_weights
from .fuse.bottlenecks import fuse_bottlenecks
from .fuse.conv_pairs import fuse_neighbours, fuse_sums
from .fuse.dense_layers import fuse_dense_layers
from .fuse.epilogues import EPILOGUES, EPILOGUES_ON_CUDA, fuse_activations, fuse_residuals
from .fuse.expansions import (
    fuse_depthwise_norms,
    fuse_expansions,
    fuse_gate_means,
    fuse_inverted_residuals,
)
from .fuse.linear_chain import join_linear_layers
from .fuse.mean_linear import fuse_means
from .fuse.pooling import fuse_pools, fuse_stem_pairs, pool_first
from .fuse.prologues import fuse_prologues
from .fuse.squeeze_excite import fuse_gates, scale_by_gates
from .layout.alignment import align_channels
from .layout.channels_last import channels_last, mark_stem, round_operands
from .layout.gemm import convolve_products, convolve_rows, fold_constants_after

__all__ = [
    "EPILOGUES",
    "Pass",
    "align_channels",
    "channels_last",
    "compose_transposes",
    "drop_identities",
    "drop_unused",
    "fold_affine_after",
    "fold_affine_before",
    "fold_constants",
    "fold_padding",
    "fuse",
    "fuse_activations",
    "fuse_bottlenecks",
    "fuse_dense_layers",
    "fuse_depthwise_norms",
    "fuse_expansions",
    "fuse_functions_of_rows",
    "fuse_gate_means",
    "fuse_gates",
    "fuse_inverted_residuals",
    "fuse_means",
    "fuse_neighbours",
    "fuse_pools",
    "fuse_prologues",
    "fuse_residuals",
    "fuse_stem_pairs",
    "fuse_sums",
    "join_linear_layers",
    "lay_channels_last",
    "mark_stem",
    "merge_shapes",
    "nest_concatenations",
    "order_weights",
    "plain_convolutions",
    "pool_first",
    "recognise_functions",
    "reshape_ones",
    "round_operands",
    "scale_by_gates",
    "share_constants",
    "simplify",
]

Pass = Callable[[Graph], Graph]

SIMPLIFYING: tuple[Pass, ...] = (
    fold_constants,
    drop_identities,
    merge_shapes,
    recognise_functions,
    fold_padding,
    fold_affine_after,
    fold_affine_before,
    drop_unused,
)
FUSING: tuple[Pass, ...] = (fuse_residuals, fuse_activations)
LAYING: tuple[Pass, ...] = (
    channels_last,
    convolve_products,
    convolve_rows,
    fold_constants_after,
    fuse_residuals,
    pool_first,
    fuse_prologues,
    fuse_activations,
    nest_concatenations,
    compose_transposes,
)
#: By the channels that convolutions read at once: 16 bytes of float32, or of 16 bits.
LAYING_ON_CUDA: dict[int, tuple[Pass, ...]] = {
    run: (
        partial(align_channels, run=run),
        partial(channels_last, shuffles=True),
        order_weights,
        convolve_products,
        fold_constants_after,
        fuse_residuals,
        # Before pools change places with convolutions that have nothing before them: a norm and a relu by
        # themselves cost more than the places that are pooled afterwards.
        partial(fuse_prologues, run=run),
        pool_first,
        partial(fuse_activations, functions=EPILOGUES_ON_CUDA),
        fuse_gates,
        nest_concatenations,
    )
    for run in (4, 8)
}


def simplify(graph: Graph) -> Graph:
    """Returns ``graph`` without the nodes that need not be run: folded, or with nothing to do."""
    return _until_done(graph, SIMPLIFYING)


def fuse(graph: Graph) -> Graph:
    """Returns ``graph`` with residual additions and activations as parts of the convolutions before them."""
    return _until_done(graph, FUSING)


def fuse_functions_of_rows(graph: Graph) -> Graph:
    """Returns ``graph`` with activations as parts of the linear layers before them, for CUDA."""
    return fuse_activations(graph, functions={"linear": EPILOGUES_ON_CUDA["linear"]})


def lay_channels_last(graph: Graph, device: str = "cpu", run: int = 4) -> Graph:
    """Returns ``graph`` as the fastest kernels run it: images between convolutions are [N, H, W, C].

    Products over channels become convolutions; what precedes one, and all functions that follow it,
    become parts of it. On ``cuda`` what precedes does where channels come in runs of 4 or, in 16 bits, of
    8, images get channels in whole runs, linear layers read images as they lie, and what makes the gates
    of squeeze-and-excite blocks becomes one node.
    """
    return _until_done(graph, LAYING_ON_CUDA[run] if device == "cuda" else LAYING)


def _until_done(graph: Graph, passes: Sequence[Pass]) -> Graph:
    """Runs ``passes`` in turn until none finds anything: each of them takes nodes away."""
    found, before = graph, None
    while found is not before:
        before = found
        for rewrite in passes:
            found = rewrite(found)
    if found is graph or graph.rebuild is None:
        return found
    return replace(found, rebuild=_Again(graph.rebuild, passes, found))


@dataclass(frozen=True)
class _Again:
    """Rewrites a graph for another batch as ``found`` was rewritten; an object, so that it can be pickled."""

    rebuild: Callable[[int], Graph]
    passes: Sequence[Pass]
    found: Graph

    def __call__(self, batch: int) -> Graph:
        return _until_done(self.rebuild(batch), self.passes).sharing(self.found)
