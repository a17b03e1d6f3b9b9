"""Passes that turn a network's graph into one for a device: one list, in order.

:data:`PIPELINE` is all there is: the engine, ``inspect``, tuning and tests run :func:`lower`, which reads it.
To add a pass, write a function from graph to graph in :mod:`cnn_engine.graph.passes`, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..graph import passes
from ..graph.graph import Graph, Node, Note
from ..graph.passes.canonical.convolutions import LEAST_FLOPS_ON_CUDA, MOST_ON_CUDA
from ..graph.passes.fuse.epilogues import EPILOGUES_ON_CUDA
from ..graph.passes.fuse.patterns import (
    BOTTLENECK,
    BOTTLENECK_AND_NEXT,
    CONV2D_POOL,
    CONV2D_SUM,
    DENSE_LAYER,
    DEPTHWISE_NORM,
    EXPAND_DEPTHWISE,
    EXPAND_DEPTHWISE_MEAN,
    INVERTED_RESIDUAL,
    LINEAR_LAYERS,
    MEAN_LINEAR,
    SQUEEZE_EXCITE,
)
from ..graph.passes.fuse.regions import Finder, WhyNot
from ..kernels import why_not_fuse
from ..kernels.cuda.depthwise_means import box_of_means
from ..kernels.cuda.requirements import TENSOR_CORES, WGMMA
from . import reduced_precision


@dataclass
class Setting:
    """Settings that decide which passes run.

    Attributes:
        device: its ``kind`` decides; passes ``by_size`` ask its kernels.
        dtype: what kernels may round to what they multiply.
        fuses: whether residual additions and activations become part of convolutions.
        channels_last: whether images lie [N, H, W, C] between convolutions.
        fuse_network: makes one node of the first layers, for the kernel that runs them in one call; or None.
        rows_follow: whether what follows that node are linear layers for tensor cores.
        simplified: whether the graph went through :func:`passes.simplify` already, as a model's did.
        batch_invariant: whether regions are left alone that no kernel runs with the same bits in any batch.
        in_float32: node -> why it keeps float32 though others round; None until it was looked for.
        refused: what :class:`Lowered` has of that name, of the last graph.
    """

    device: Any
    dtype: str = "float32"
    fuses: bool = True
    channels_last: bool = True
    fuse_network: Callable[[Graph], Graph] | None = None
    rows_follow: bool = False
    simplified: bool = True
    batch_invariant: bool = False
    in_float32: Mapping[str, str] | None = field(default=None, compare=False)
    refused: list[Note] = field(default_factory=list, compare=False)

    @property
    def on_cpu(self) -> bool:
        return self.device.kind == "cpu"

    @property
    def on_cuda(self) -> bool:
        return self.device.kind == "cuda"

    @property
    def stores_16_bits(self) -> bool:
        """Whether values between kernels lie in memory in 16 bits."""
        return self.on_cuda and self.dtype in reduced_precision.DTYPES

    @property
    def vector_width(self) -> int:
        """Channels that a convolution reads at once: 16 bytes of them."""
        return 8 if self.stores_16_bits else 4


Rewrite = Callable[[Graph, Setting], Graph]


@dataclass(frozen=True)
class Pass:
    """One entry of the list.

    Attributes:
        name: of the rewrite.
        rewrite: makes the graph; returns the same object where it finds nothing.
        why: what it is for.
        when: which settings it runs in.
        by_size: whether it asks the device's cost model, which knows the batch: such passes run again for
            each batch.
    """

    name: str
    rewrite: Rewrite
    why: str
    when: Callable[[Setting], bool] = lambda setting: True
    by_size: bool = False


@dataclass(frozen=True)
class Repeated:
    """Passes that run in turn until none of them finds anything: one may make work for another."""

    passes: tuple[Pass, ...]
    when: Callable[[Setting], bool] = lambda setting: True


@dataclass(frozen=True)
class Ran:
    """Effect of a pass, for reports.

    Attributes:
        name, why: the pass's.
        before, after: nodes.
    """

    name: str
    why: str
    before: int
    after: int


@dataclass(frozen=True)
class Lowered:
    """A graph for a device, and the passes that made it.

    Attributes:
        ran: the passes that changed it.
        refused: of the regions that patterns found, those that no kernel of the device takes: the name that
            the region's node would have had, the pattern, and each kernel's reason.
    """

    graph: Graph
    ran: tuple[Ran, ...]
    refused: tuple[Note, ...] = ()


def lower(
    graph: Graph, setting: Setting, entries: Sequence[Pass | Repeated] | None = None
) -> Lowered:
    """Returns ``graph`` after all passes that ``setting`` asks for.

    Args:
        entries: a part of :data:`PIPELINE`; None: all of it.
    """
    ran: list[Ran] = []
    setting.refused = []
    for entry in PIPELINE if entries is None else entries:
        if not entry.when(setting):
            continue
        if isinstance(entry, Repeated):
            group = [partial(_run, one, setting=setting, ran=ran) for one in entry.passes]
            graph = passes.until_done(graph, group)
        else:
            graph = _run(entry, graph, setting, ran)
    return Lowered(graph, tuple(ran), tuple(setting.refused))


def stages(setting: Setting) -> tuple[Sequence[Pass | Repeated], Sequence[Pass | Repeated]]:
    """Returns the part of :data:`PIPELINE` that decides alike for every batch, and the part that may not.

    The first runs once for all batches, the second again for each: it begins with the first pass ``by_size``.
    """
    entries = [entry for entry in PIPELINE if entry.when(setting)]
    first = next(
        (i for i, entry in enumerate(entries) if isinstance(entry, Pass) and entry.by_size),
        len(entries),
    )
    return entries[:first], entries[first:]


def _run(one: Pass, graph: Graph, setting: Setting, ran: list[Ran]) -> Graph:
    if not one.when(setting):
        return graph
    after = one.rewrite(graph, setting)
    if after is not graph:
        ran.append(Ran(one.name, one.why, len(graph.nodes), len(after.nodes)))
    return after


def _pass(
    rewrite: Callable[..., Graph],
    why: str,
    when: Callable[[Setting], bool] = lambda setting: True,
    **arguments: Any,
) -> Pass:
    """Returns the entry of a rewrite that reads nothing of the setting."""
    bound = partial(rewrite, **arguments)
    return Pass(rewrite.__name__, lambda graph, setting: bound(graph), why, when)


def _asking(
    rewrite: Callable[[Graph, WhyNot], Graph], why: str, when: Callable[[Setting], bool]
) -> Pass:
    """Returns the entry of a rewrite that asks the device whether one kernel is faster."""
    return Pass(
        rewrite.__name__,
        lambda graph, setting: rewrite(graph, partial(_why_not, setting)),
        why,
        when,
        by_size=True,
    )


def _why_not(setting: Setting, graph: Graph, region: Node) -> str | None:
    reason = why_not_fuse(setting.device, graph, region, setting.batch_invariant)
    if reason is not None:
        setting.refused.append(Note(region.name, region.op.kind, reason))
    return reason


def _fusing(why: str, when: Callable[[Setting], bool], *patterns: Finder) -> Pass:
    """Returns the entry that makes regions: of several patterns each node takes the first that it can."""
    asking = _asking(
        lambda graph, why_not: passes.fuse_regions(graph, patterns, why_not), why, when
    )
    return replace(asking, name=f"fuse_{patterns[0].name}")


def _fusing_all(why: str, when: Callable[[Setting], bool], pattern: Finder) -> Pass:
    """Returns the entry that makes regions of all that a pattern finds: a kernel always runs them sooner."""
    one = _pass(passes.fuse_regions, why, when, patterns=(pattern,))
    return replace(one, name=f"fuse_{pattern.name}")


# ---- what a setting asks for ----


def _layers(setting: Setting) -> bool:
    return setting.fuses and setting.fuse_network is None


def _images(kind: str) -> Callable[[Setting], bool]:
    return lambda setting: setting.channels_last and setting.device.kind == kind


def _on_tensor_cores(setting: Setting) -> bool:
    on_cuda = setting.channels_last and setting.on_cuda
    return on_cuda and TENSOR_CORES.met_by(setting.device.target)


def _images_in_16_bits(setting: Setting) -> bool:
    return setting.channels_last and setting.stores_16_bits


def _expands_on_cpu(setting: Setting) -> bool:
    pays = "avx512_bf16_fast" in setting.device.target.features
    plain = setting.dtype == "float32" or not pays
    return setting.channels_last and setting.on_cpu and plain


def _rounds(setting: Setting) -> bool:
    if setting.channels_last:
        return setting.on_cuda or setting.dtype != "float32"
    return setting.fuses and setting.on_cuda and setting.dtype != "float32"


# ---- passes that read the setting ----


def _fuse_network(graph: Graph, setting: Setting) -> Graph:
    return setting.fuse_network(graph)


def _round_rows(graph: Graph, setting: Setting) -> Graph:
    # Of float16 tf32 has the bits, and no range that what the fused network made could be past.
    dtype = "tf32" if setting.dtype == "float16" else setting.dtype
    return passes.set_compute_dtype(graph, dtype)


def _align_channels(graph: Graph, setting: Setting) -> Graph:
    return passes.align_channels(graph, setting.vector_width)


def _regroup(graph: Graph, setting: Setting) -> Graph:
    return passes.regroup(graph, setting.vector_width, WGMMA.met_by(setting.device.target))


def _fuse_prologues(graph: Graph, setting: Setting) -> Graph:
    return passes.fuse_prologues(graph, setting.vector_width)


def _kept_in_float32(graph: Graph, setting: Setting) -> Collection[str]:
    """Returns the nodes that keep float32; weights take long to look through, and are the same for all."""
    if setting.in_float32 is None and setting.on_cuda and setting.dtype in reduced_precision.PAST:
        setting.in_float32 = reduced_precision.not_held(graph, setting.dtype)
    return setting.in_float32 or {}


def _set_compute_dtype(graph: Graph, setting: Setting) -> Graph:
    return passes.set_compute_dtype(graph, setting.dtype, _kept_in_float32(graph, setting))


def _store_rounded(graph: Graph, setting: Setting) -> Graph:
    whole = _kept_in_float32(graph, setting)
    return reduced_precision.store_rounded(graph, setting.dtype, setting.device.target, whole)


def _lower_qdq(graph: Graph, setting: Setting) -> Graph:
    return passes.lower_qdq(graph, setting.refused)


# ---- the list ----

#: What every network goes through, for every device and option.
SIMPLIFY = Repeated(
    tuple(_pass(rewrite, rewrite.__doc__.splitlines()[0]) for rewrite in passes.SIMPLIFYING),
    lambda setting: not setting.simplified,
)

#: Layers of a quantized network, on every device. Variants that are named run the convolutions of floats.
LOWER_QDQ = (
    Pass("lower_qdq", _lower_qdq, "quantized layers compute with integers", _layers),
    _pass(
        passes.fold_dequantized, "dequantized weights of float layers are computed while loading"
    ),
)

#: A convolution's epilogue, on every device.
FUSE = Repeated(
    (
        _pass(passes.fuse_residuals, "a residual is added in the epilogue"),
        _pass(passes.fuse_activations, "an activation runs in the epilogue"),
    ),
    _layers,
)

LAY_OUT_ON_CPU = Repeated(
    (
        _pass(passes.order_filters, "a pixel shuffle moves vectors of channels"),
        _pass(passes.channels_last, "the fastest convolutions read images [N, H, W, C]"),
        _pass(passes.convolve_matmuls, "matrix products over channels are 1x1 convolutions"),
        _pass(passes.convolve_rows, "matrix products of rows are 1x1 convolutions with epilogues"),
        _pass(passes.linear_matmuls, "matrix products of [N, C] are linear layers, packed once"),
        _pass(passes.fold_constants_after, "constants of channels go into the weights"),
        _pass(passes.fuse_residuals, "a residual is added in the epilogue"),
        _pass(passes.pool_before_convolutions, "a 1x1 convolution of fewer pixels does less"),
        _pass(passes.fuse_prologues, "a scale and a relu run in the convolution's prologue"),
        _pass(passes.fuse_activations, "an activation runs in the epilogue"),
        _pass(passes.nest_concatenations, "a longer concatenation holds the shorter one"),
        _pass(passes.compose_transposes, "one transpose does what several did"),
    ),
    _images("cpu"),
)

LAY_OUT_ON_CUDA = Repeated(
    (
        _pass(passes.order_filters, "a pixel shuffle moves vectors of channels"),
        Pass("align_channels", _align_channels, "kernels read channels in whole vectors"),
        _pass(
            passes.channels_last, "the fastest convolutions read images [N, H, W, C]", shuffles=True
        ),
        _pass(passes.order_weights, "linear layers read [N, H, W, C] as it lies"),
        _pass(passes.convolve_matmuls, "matrix products over channels are 1x1 convolutions"),
        _pass(passes.fold_constants_after, "constants of channels go into the weights"),
        _pass(passes.fuse_residuals, "a residual is added in the epilogue"),
        # Before pools swap with convolutions that have nothing before them: a norm and a relu by
        # themselves cost more than the pixels that are pooled afterwards.
        Pass(
            "fuse_prologues", _fuse_prologues, "a scale and a relu run in the convolution's prologue"
        ),
        _pass(passes.pool_before_convolutions, "a 1x1 convolution of fewer pixels does less"),
        _pass(
            passes.fuse_activations, "an activation runs in the epilogue",
            functions=EPILOGUES_ON_CUDA,
        ),
        _fusing_all(
            "one launch runs the three nodes of a squeeze-and-excite gate", lambda setting: True,
            SQUEEZE_EXCITE,
        ),
        _pass(passes.nest_concatenations, "a longer concatenation holds the shorter one"),
    ),
    _images("cuda"),
)  # fmt: skip

#: GPUs whose kernels of floats read [N, C, H, W].
LAY_OUT_INTEGERS = _pass(
    passes.channels_last, "integer kernels read images [N, H, W, C]",
    lambda setting: setting.on_cuda and _layers(setting) and not setting.channels_last, integers=True,
)  # fmt: skip

#: All passes of a device's graph, in order.
PIPELINE: tuple[Pass | Repeated, ...] = (
    SIMPLIFY,
    *LOWER_QDQ,
    # Where one kernel runs the first layers.
    Pass(
        "fuse_network", _fuse_network, "one kernel runs these layers in one call",
        lambda setting: setting.fuse_network is not None,
    ),
    _pass(
        passes.fuse_linear_activations, "an activation runs in a linear layer's epilogue",
        lambda setting: setting.rows_follow,
    ),
    Pass(
        "set_compute_dtype", _round_rows, "tensor cores multiply in the compute dtype",
        lambda setting: setting.rows_follow,
    ),
    _fusing(
        "one kernel runs small linear layers in a row", lambda setting: setting.rows_follow,
        LINEAR_LAYERS,
    ),
    # Where each layer is a kernel's.
    FUSE,
    _pass(
        passes.lower_convolutions, "the CPU's kernels take 2-D convolutions", _images("cpu")
    ),
    _pass(
        passes.convolve_phases, "tensor cores run convolutions, but not transposed ones",
        _on_tensor_cores, most=MOST_ON_CUDA, least_flops=LEAST_FLOPS_ON_CUDA, zeros=True,
    ),
    Pass("regroup", _regroup, "groups fill the tiles of tensor cores", _on_tensor_cores),
    LAY_OUT_ON_CPU,
    LAY_OUT_ON_CUDA,
    LAY_OUT_INTEGERS,
    _pass(
        passes.reshape_ones, "a transpose that moves dimensions of 1 moves nothing", _images("cuda")
    ),
    _pass(
        passes.share_constants, "equal weights are stored once",
        lambda setting: setting.channels_last,
    ),
    _pass(passes.mark_stem, "the CPU's kernels sum the first layers in another order", _images("cpu")),
    Pass(
        "set_compute_dtype", _set_compute_dtype, "kernels multiply in the compute dtype", _rounds,
        by_size=True,
    ),
    _fusing_all(
        "the expanded activations stay in a core's caches", _expands_on_cpu, EXPAND_DEPTHWISE_MEAN
    ),
    Pass(
        "store_rounded", _store_rounded, "activations are stored in 16 bits",
        _images_in_16_bits,
    ),
    _fusing("two added convolutions share their accumulators", _images("cuda"), CONV2D_SUM),
    _asking(passes.fuse_conv_pairs, "two small convolutions fill a GPU", _images("cuda")),
    _fusing("a mean and a linear layer are one kernel", _images("cuda"), MEAN_LINEAR),
    _fusing("a convolution normalises what it makes", _images("cuda"), DEPTHWISE_NORM),
    _fusing("one kernel runs an inverted residual block", _images_in_16_bits, INVERTED_RESIDUAL),
    _fusing("the expanded activations stay in shared memory", _images_in_16_bits, EXPAND_DEPTHWISE),
    Pass(
        "fuse_squeeze_excite",
        lambda graph, setting: passes.fuse_squeeze_excite(graph, partial(box_of_means, setting.device)),
        "a convolution makes the means that gates read", _images("cuda"), by_size=True,
    ),
    _fusing(
        "one kernel runs a residual block's end", _images("cuda"), BOTTLENECK_AND_NEXT, BOTTLENECK
    ),
    _fusing("one kernel runs the seam of two dense layers", _images_in_16_bits, DENSE_LAYER),
    _fusing("a convolution pools what it makes", _images_in_16_bits, CONV2D_POOL),
    _asking(
        passes.fuse_excite_scales, "a gate multiplies the image that it has just read", _images_in_16_bits
    ),
    # Last, of what no other kernel took up.
    _pass(
        passes.fold_constants, "what passes made of constants is computed while loading", _images("cpu")
    ),
    _pass(
        passes.fuse_pointwise, "functions in a row read and write memory once",
        lambda setting: _layers(setting) and setting.on_cpu,
    ),
    _asking(
        passes.fuse_pointwise, "functions in a row read and write memory once",
        lambda setting: _layers(setting) and setting.on_cuda,
    ),
)  # fmt: skip
