"""Channel shuffles, as ShuffleNet has them, where images lie with their channels side by side."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import lay_channels_last
from test_channels_last import as_float32
from test_passes import Builder, kinds, same

from cnn_engine import Engine
from cnn_engine.graph.reference import reference
from cnn_engine.operators.shaping import Concat, Reshape, Slice, Transpose
from cnn_engine.operators.unary import Relu


def shuffle(b: Builder, x: str, image, apart, perm=None) -> str:
    """Takes channels apart, exchanges dimensions and puts them together again."""
    perm = perm or (0, 2, 1, *range(3, len(apart)))
    return b.add(Reshape(image), b.add(Transpose(perm), b.add(Reshape(apart), x)))


def turned(graph):
    return lay_channels_last(graph, "cuda")


@pytest.mark.parametrize("rest", [(5, 7), (35,), (5, 7, 1)])
@pytest.mark.parametrize("groups", [2, 3])
def test_a_shuffle_is_one_transpose_of_the_last_two_dimensions(groups, rest):
    b = Builder(2, 3, 5, 7)
    y = b.conv("x", 3, 6, padding=(1,) * 4)
    y = b.conv(shuffle(b, y, (2, 6, 5, 7), (2, groups, 6 // groups, *rest)), 6, 4)
    after = same(b.graph(y), turned)
    orders = [node.op.perm for node in after.nodes if type(node.op) is Transpose]
    assert orders == [(0, 1, 2, 4, 3), (0, 3, 1, 2)]  # the last for the output's sake


@pytest.mark.parametrize(
    ("apart", "perm", "image"),
    [
        ((2, 2, 3, 5, 6), (0, 2, 1, 4, 3), (2, 6, 5, 6)),  # rows and columns exchanged, too
        ((2, 2, 3, 5, 6), (1, 0, 2, 3, 4), (2, 6, 5, 6)),  # images and groups
        ((2, 2, 3, 5, 6), (0, 2, 1, 3, 4), (2, 6, 6, 5)),  # another image behind it
        ((2, 3, 4, 5, 3), (0, 2, 1, 3, 4), (2, 6, 5, 6)),  # not channels alone
        ((1, 4, 3, 5, 6), (0, 2, 1, 3, 4), (2, 6, 5, 6)),  # images are channels
    ],
)
def test_other_orders_stay(apart, perm, image):
    b = Builder(2, 3, 5, 6)
    y = shuffle(b, b.conv("x", 3, 6, padding=(1,) * 4), image, apart, perm)
    after = same(b.graph(b.conv(y, 6, 4)), turned)
    assert Transpose(perm) in [node.op for node in after.nodes]


@pytest.mark.parametrize("place", [0, 1])
def test_what_others_read_within_a_shuffle_stays(place):
    b = Builder(2, 3, 5, 7)
    y = shuffle(b, b.conv("x", 3, 6, padding=(1,) * 4), (2, 6, 5, 7), (2, 2, 3, 5, 7))
    within = b.nodes[-3 + place].outputs[0]
    y = b.conv(y, 6, 4)
    same(b.graph(y, within), turned)
    same(b.graph(y, b.add(Relu(), within)), turned)


def test_a_shuffle_may_be_an_output_and_read_twice():
    b = Builder(2, 3, 5, 7)
    y = shuffle(b, b.conv("x", 3, 6, padding=(1,) * 4), (2, 6, 5, 7), (2, 3, 2, 5, 7))
    after = same(b.graph(y, b.conv(y, 6, 4), b.conv(y, 6, 2)), turned)
    assert kinds(after).count("transpose") == 4  # the shuffle, and what each output is in


def test_a_shuffle_of_an_input_stays():
    b = Builder(2, 6, 5, 7)
    y = b.conv(shuffle(b, "x", (2, 6, 5, 7), (2, 3, 2, 5, 7)), 6, 4)
    assert Transpose((0, 2, 1, 3, 4)) in [node.op for node in same(b.graph(y), turned).nodes]


def unit(b: Builder, x: str, n: int, channels: int, side: int) -> str:
    """A unit of ShuffleNet V2 of stride 1."""
    half = channels // 2
    left, right = (b.add(Slice((first,), (first + half,), (1,), (1,)), x) for first in (0, half))
    right = b.add(Relu(), b.conv(right, half, half, 1))
    right = b.conv(right, half, half, padding=(1,) * 4, groups=half)
    right = b.add(Relu(), b.conv(right, half, half, 1))
    y = b.add(Concat(1), left, right)
    return shuffle(b, y, (n, channels, side, side), (n, 2, half, side, side))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([4, 8, 12, 20]),
    st.sampled_from([1, 4, 5]),
)
def test_units_of_a_shufflenet(n, units, channels, side):
    b = Builder(n, 3, side, side)
    y = b.conv("x", 3, channels, padding=(1,) * 4)
    for _ in range(units):
        y = unit(b, y, n, channels, side)
    after = same(b.graph(b.conv(y, channels, 5, 1)), turned)
    if n and side > 1:
        assert kinds(after).count("transpose") == units + 1


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        *(pytest.param("cuda", d, marks=pytest.mark.gpu) for d in ("float32", "float16")),
    ],
)
def test_engines(device, dtype):
    b = Builder(1, 3, 9, 9)
    y = b.conv("x", 3, 16, padding=(1,) * 4)
    for _ in range(3):
        y = unit(b, y, 0, 16, 9)  # as many images as there are
    graph = as_float32(b.graph(b.add(Reshape((0, -1)), b.add(Relu(), y))))
    with Engine(graph, device=device, dtype=dtype) as engine:
        for batch in (1, 5):
            x = np.random.default_rng(batch).uniform(-1, 1, (batch, 3, 9, 9)).astype(np.float32)
            (wanted,) = reference(engine.network.graph(batch), {"x": x}).values()
            bound = tolerances.FEW_LAYERS[dtype] * np.abs(wanted).max()
            tolerances.assert_close(engine.predict(x), wanted, bound)
        laid = engine._plans.open().placed(1, False).graph
    orders = [node.op.perm for node in laid.nodes if type(node.op) is Transpose]
    assert ((0, 1, 2, 4, 3) in orders) == (device == "cuda")
