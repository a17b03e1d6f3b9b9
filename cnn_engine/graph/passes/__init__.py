"""Graph passes: functions from a graph to an equivalent one. Each notes its changes and its reasons.

:func:`simplify` takes away what need not be run, on every device. Which others run for a device, and in what
order, is :data:`cnn_engine.lower.pipeline.PIPELINE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..dims import Sizes
from ..graph import Graph
from ..specialization import Specializations
from .canonical.activations import recognise_activations
from .canonical.batch_norm import fold_affine_after, fold_affine_before
from .canonical.concatenations import nest_concatenations
from .canonical.constants import drop_unused, fold_constants, share_constants
from .canonical.convolutions import convolve_phases, lower_convolutions
from .canonical.groups import regroup
from .canonical.identities import drop_identities, merge_shapes, reshape_ones
from .canonical.padding import fold_padding
from .canonical.parallel import merge_parallel
from .canonical.scales import factor_scales, split_sums
from .canonical.transposes import compose_transposes, order_filters, order_weights
from .fuse.conv_pairs import fuse_conv_pairs
from .fuse.epilogues import EPILOGUES, EPILOGUES_ON_CUDA, fuse_activations, fuse_residuals
from .fuse.pointwise import fuse_pointwise
from .fuse.pooling import pool_before_convolutions
from .fuse.prologues import fuse_prologues
from .fuse.regions import fuse_regions
from .fuse.squeeze_excite import fuse_excite_scales, fuse_squeeze_excite
from .layout.alignment import align_channels
from .layout.channels_last import channels_last, mark_stem, set_compute_dtype
from .layout.gemm import convolve_matmuls, convolve_rows, fold_constants_after, linear_matmuls
from .quantize.lower_qdq import fold_dequantized, lower_qdq

__all__ = [
    "EPILOGUES",
    "SIMPLIFYING",
    "Pass",
    "align_channels",
    "channels_last",
    "compose_transposes",
    "drop_identities",
    "drop_unused",
    "factor_scales",
    "fold_affine_after",
    "fold_affine_before",
    "fold_constants",
    "fold_dequantized",
    "fold_padding",
    "convolve_matmuls",
    "convolve_phases",
    "convolve_rows",
    "fold_constants_after",
    "fuse_activations",
    "fuse_linear_activations",
    "fuse_squeeze_excite",
    "fuse_conv_pairs",
    "fuse_pointwise",
    "fuse_prologues",
    "fuse_regions",
    "fuse_residuals",
    "lower_qdq",
    "mark_stem",
    "merge_parallel",
    "merge_shapes",
    "nest_concatenations",
    "order_filters",
    "order_weights",
    "linear_matmuls",
    "lower_convolutions",
    "pool_before_convolutions",
    "recognise_activations",
    "regroup",
    "reshape_ones",
    "set_compute_dtype",
    "fuse_excite_scales",
    "share_constants",
    "split_sums",
    "simplify",
    "until_done",
]

Pass = Callable[[Graph], Graph]

SIMPLIFYING: tuple[Pass, ...] = (
    fold_constants,
    drop_identities,
    merge_shapes,
    recognise_activations,
    fold_padding,
    fold_affine_after,
    fold_affine_before,
    merge_parallel,
    factor_scales,
    split_sums,
    drop_unused,
)


def simplify(graph: Graph) -> Graph:
    """Returns ``graph`` without the nodes that need not be run: folded, or with nothing to do."""
    found = until_done(graph, SIMPLIFYING)
    if found is graph or graph.rebuild is None:
        return found
    first = replace(found, rebuild=None, like=found)
    rebuild = Specializations(partial(_simplified, graph.rebuild), first)
    return replace(found, rebuild=rebuild, like=found)


def fuse_linear_activations(graph: Graph) -> Graph:
    """Returns ``graph`` with activations as parts of the linear layers before them, for CUDA."""
    return fuse_activations(graph, functions={"linear": EPILOGUES_ON_CUDA["linear"]})


def until_done(graph: Graph, passes: Sequence[Pass]) -> Graph:
    """Runs ``passes`` in turn until none finds anything: one may make work for another."""
    before = None
    while graph is not before:
        before = graph
        for rewrite in passes:
            graph = rewrite(graph)
    return graph


def _simplified(rebuild: Callable[[Sizes], Graph], sizes: Sizes) -> Graph:
    return until_done(rebuild(sizes), SIMPLIFYING)
