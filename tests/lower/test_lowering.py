"""Random networks, rewritten for both devices: the reference's outputs stay, and a CPU's kernels make them.

``CNN_ENGINE_LOWERINGS`` is how many networks of each kind; seeds count up from ``CNN_ENGINE_LOWERING_SEED``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from fake_cuda import FakeCuda, FakeTensorCores
from lowered import fuse, lay_channels_last
from random_networks import network
from tolerances import FEW_LAYERS, assert_close

from cnn_engine import Engine
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.graph import passes
from cnn_engine.graph.graph import Graph
from cnn_engine.graph.model import Model
from cnn_engine.graph.passes.fuse import patterns
from cnn_engine.graph.reference import reference
from cnn_engine.kernels import select
from cnn_engine.lower.lowering import Program
from cnn_engine.lower.placement import Placement

COUNT = int(os.environ.get("CNN_ENGINE_LOWERINGS", "40"))
FIRST = int(os.environ.get("CNN_ENGINE_LOWERING_SEED", "0"))

#: Of float64, for which a rewrite's own rounding is all that can differ: beside the largest number there is.
EXACT = 2**13 * np.finfo(np.float64).eps


class _AnyFusion(FakeTensorCores):
    """Kernels that make together what rewrites can put together."""

    def __getattribute__(self, name: str):
        if name.endswith("_takes") or name == "squeeze_excite_scales":
            return lambda *_: 1
        return super().__getattribute__(name)


def cuda() -> FakeCuda:
    device = FakeCuda(tensor_cores=True)
    device.kernels = _AnyFusion()
    return device


def laid(graph: Graph, device, dtype: str = "float32") -> Graph:
    """Returns the graph as an engine runs it on a device."""
    types = select.layered_dtypes(device, True)
    choice = select.choose(
        device.kind, "auto", None, dtype, "resident", lambda: "several nodes", types
    )
    placement = Placement(device, "resident", 1)
    program = Program(lambda *_: graph, placement, choice, dtype, (1, False), fuses=True)
    assert program.channels_last
    return program.laid(1, False)


def together(graph: Graph) -> Graph:
    """Returns the graph with all nodes together that rewrites can put together, in whatever kernel."""
    graph = lay_channels_last(fuse(graph), "cuda", 4)
    graph = passes.set_compute_dtype(graph, "tf32")
    graph = passes.fuse_conv_pairs(passes.fuse_regions(graph, (patterns.CONV2D_SUM,)))
    for finder in (
        patterns.MEAN_LINEAR, patterns.DEPTHWISE_NORM, patterns.INVERTED_RESIDUAL,
        patterns.EXPAND_DEPTHWISE, patterns.DENSE_LAYER, patterns.BOTTLENECK_AND_NEXT,
        patterns.BOTTLENECK, patterns.CONV2D_POOL, patterns.LINEAR_LAYERS,
    ):  # fmt: skip
        graph = passes.fuse_regions(graph, (finder,))
    graph = passes.fuse_squeeze_excite(graph, lambda *_: (7, 7))
    return passes.fuse_excite_scales(graph)


#: What is done to a graph, by its name.
ROADS = {
    "simplified": lambda graph: graph,
    "fused": fuse,
    "cpu": lambda graph: laid(graph, CpuDevice()),
    "cuda float32": lambda graph: laid(graph, cuda()),
    "cuda tf32": lambda graph: laid(graph, cuda(), "tf32"),
    "together": together,
    "cuda float16": lambda graph: laid(graph, cuda(), "float16"),
}


def made_and_sizes(graph: Graph, inputs: dict[str, np.ndarray]):
    """Returns the outputs, and of every value that is made on the way the largest number's size."""
    sizes = [np.abs(array).max(initial=0) for array in inputs.values()]

    def run(node, _graph, *arrays):
        results = node.op.reference(*arrays)
        for one in results if isinstance(results, tuple) else (results,):
            sizes.append(np.abs(one).max(initial=0))
        return results

    with np.errstate(all="ignore"):
        return reference(graph, inputs, run), np.array(sizes)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rewrites_keep_what_a_network_computes(road, dtype):
    for seed in range(FIRST, FIRST + COUNT):
        graph, inputs = network(seed, dtype)
        wanted, sizes = made_and_sizes(graph, inputs)
        after = ROADS[road](Model(graph).base)
        assert after.outputs == graph.outputs
        found = reference(after, inputs)
        part = EXACT if dtype == "float64" else FEW_LAYERS["float32"]
        for name in graph.outputs:
            assert_close(found[name], wanted[name], part * sizes.max(), seed=seed, output=name)


@pytest.mark.parametrize("road", ROADS)
def test_rewrites_keep_factors_of_any_size(road):
    """What a pass makes on its way has room in float64; what a rewrite makes of the weights may have none."""
    compared = 0
    for seed in range(FIRST, FIRST + COUNT):
        graph, inputs = network(seed, "float64", hostile=True)
        wanted, sizes = made_and_sizes(graph, inputs)
        after = ROADS[road](Model(graph).base)
        if not (sizes.min() > 1e-300 and sizes.max() < 1e150):
            continue  # the network itself loses numbers that a rewrite may keep
        compared += 1
        with np.errstate(all="ignore"):
            found = reference(after, inputs)
        for name in graph.outputs:
            part = EXACT * np.abs(wanted[name]).max(initial=0)
            assert_close(found[name], wanted[name], part, seed=seed, output=name)
    assert compared > COUNT // 2


def test_a_cpu_computes_what_the_network_does():
    for seed in range(FIRST, FIRST + COUNT):
        graph, inputs = network(seed, "float32")
        wanted, sizes = made_and_sizes(graph, inputs)
        with Engine(graph, device="cpu", threads=1) as engine:
            found = engine.run(inputs)
        limit = FEW_LAYERS["float32"] * sizes.max()
        for name in graph.outputs:
            assert_close(found[name], wanted[name], limit, seed=seed, output=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16"])
def test_a_gpu_computes_what_the_network_does(dtype):
    for seed in range(FIRST, FIRST + COUNT):
        graph, inputs = network(seed, "float32")
        wanted, sizes = made_and_sizes(graph, inputs)
        with Engine(graph, device="cuda", dtype=dtype) as engine:
            found = engine.run(inputs)
        limit = FEW_LAYERS[dtype] * sizes.max()
        for name in graph.outputs:
            assert_close(found[name], wanted[name], limit, seed=seed, output=name)
