"""Pixels and channels that are exchanged in blocks, where images lie with their channels side by side."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
from lowered import lay_channels_last
from test_channels_last import as_float32
from test_passes import Builder, kinds, same

from cnn_engine import Engine
from cnn_engine.graph.reference import reference
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.shaping import DepthToSpace, SpaceToDepth, Transpose

BOTH = pytest.mark.parametrize("kind", ["cpu", "cuda"])
MODES = pytest.mark.parametrize("mode", ["DCR", "CRD"])


@BOTH
@MODES
@pytest.mark.parametrize("block", [2, 3])
def test_blocks_between_convolutions_are_one_transpose(kind, mode, block):
    b = Builder(2, 3, 5, 7)
    y = b.conv("x", 3, 2 * block**2, padding=(1,) * 4)
    y = b.conv(b.add(DepthToSpace(block, mode), y), 2, 4)
    after = same(b.graph(y), lambda graph: lay_channels_last(graph, kind))
    assert "depth_to_space" not in kinds(after)
    orders = [node.op.perm for node in after.nodes if type(node.op) is Transpose]
    # Whole vectors of channels move, since the filters took that order; the last is for the output's sake.
    assert orders == [(0, 1, 3, 2, 4, 5), (0, 3, 1, 2)]


@BOTH
@pytest.mark.parametrize("place", ["read elsewhere", "behind a pool", "grouped"])
def test_filters_whose_order_others_see_keep_it(kind, place):
    b = Builder(2, 4, 6, 8)
    y = within = b.conv("x", 4, 16, padding=(1,) * 4, groups=4 if place == "grouped" else 1)
    if place == "behind a pool":
        y = b.add(MaxPool2d((3, 3), (1, 1), (1, 1, 1, 1)), y)
    y = b.conv(b.add(DepthToSpace(2, "CRD"), y), 4, 5)
    graph = b.graph(y, within) if place == "read elsewhere" else b.graph(y)
    after = same(graph, lambda graph: lay_channels_last(graph, kind))
    orders = [node.op.perm for node in after.nodes if type(node.op) is Transpose]
    assert (0, 1, 4, 2, 5, 3) in orders


@BOTH
def test_space_to_depth_between_convolutions_is_one_transpose(kind):
    b = Builder(2, 3, 6, 8)
    y = b.conv(b.add(SpaceToDepth(2), b.conv("x", 3, 5, padding=(1,) * 4)), 20, 4)
    after = same(b.graph(y), lambda graph: lay_channels_last(graph, kind))
    orders = [node.op.perm for node in after.nodes if type(node.op) is Transpose]
    assert orders == [(0, 1, 3, 2, 4, 5), (0, 3, 1, 2)]


@BOTH
@MODES
def test_blocks_of_an_input_stay(kind, mode):
    b = Builder(2, 8, 5, 7)
    y = b.conv(b.add(DepthToSpace(2, mode), "x"), 2, 4)
    after = same(b.graph(y), lambda graph: lay_channels_last(graph, kind))
    assert "depth_to_space" in kinds(after)


@MODES
def test_blocks_may_be_an_output_and_read_twice(mode):
    b = Builder(2, 3, 5, 7)
    y = b.add(DepthToSpace(2, mode), b.conv("x", 3, 12, padding=(1,) * 4))
    same(b.graph(b.conv(y, 3, 4), y), lambda graph: lay_channels_last(graph, "cuda"))


@pytest.mark.parametrize("n", [1, 3])
@MODES
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_super_resolver(device, mode, n):
    b = Builder(n, 3, 9, 11)
    y = b.conv("x", 3, 20, padding=(1,) * 4)
    for channels in (20, 12):
        y = b.add(DepthToSpace(2, mode), b.conv(y, channels, 48, padding=(1,) * 4))
    graph = as_float32(b.graph(b.conv(y, 12, 3)))
    x = np.random.default_rng(n).normal(size=(n, 3, 9, 11)).astype(np.float32)
    wanted = reference(graph, {"x": x})[graph.outputs[0]]
    with Engine(graph, device=device) as engine:
        found = engine.run({"x": x})[graph.outputs[0]]
    tolerances.assert_close(found, wanted, tolerances.FEW_LAYERS["float32"] * np.abs(wanted).max())
