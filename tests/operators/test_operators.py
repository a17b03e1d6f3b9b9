"""Operator records: references against implementations that are not ours, inference against references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine import operators
from cnn_engine.errors import InputError
from cnn_engine.graph import reference as chain
from cnn_engine.operators.conv2d import Conv2d, Conv3d
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.lp_normalization import LpNormalization
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.normalize import Normalize
from cnn_engine.operators.operator import Operator, Value
from cnn_engine.operators.order import TopK
from cnn_engine.operators.pad2d import Pad2d
from cnn_engine.operators.reverse_sequence import ReverseSequence
from cnn_engine.operators.softmax import LogSoftmax, Softmax
from cnn_engine.operators.unary import Clip, Gelu, Relu, Unary


def run(op: Operator, *arrays):
    """Returns the reference's outputs, after asserting that they are what ``op`` infers."""
    values = [
        None if a is None else Value(f"x{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)
    ]
    wanted = op.infer(values)
    found = op.reference(*arrays)
    outputs = found if isinstance(found, tuple) else (found,)
    assert [array.shape for array in outputs] == [tuple(shape) for shape, _ in wanted]
    for array, (_, dtype) in zip(outputs, wanted, strict=True):
        moved = dtype if dtype in [a.dtype.name for a in arrays if a is not None] else None
        assert array.dtype.name in ("float64" if dtype.startswith("float") else dtype, moved)
    cost = op.cost(values, [Value(f"y{i}", s, d) for i, (s, d) in enumerate(wanted)])
    assert cost.flops >= 0
    assert cost.bytes > 0
    assert op.terms(values) >= 1
    return found


def test_every_record_is_registered_under_its_own_name():
    assert {"conv2d", "relu", "copy"} <= operators.KINDS.keys()
    for kind, record in operators.KINDS.items():
        assert record.kind == kind
        assert issubclass(record, Operator)


def test_conv2d_by_hand(rng):
    x, w, b = rng.normal(size=(2, 4, 7, 6)), rng.normal(size=(6, 2, 3, 2)), rng.normal(size=6)
    residual = rng.normal(size=(2, 6, 4, 7))
    op = Conv2d((2, 1), (2, 1, 1, 2), (1, 2), 2, Relu())
    y = run(op, x, w, b, residual)
    xp = np.zeros((2, 4, 10, 9))
    xp[:, :, 2:9, 1:7] = x
    for n, k, i, j in np.ndindex(y.shape):
        group = xp[n, (k // 3) * 2 : (k // 3) * 2 + 2]
        total = sum(
            group[c, 2 * i + r, j + 2 * s] * w[k, c, r, s] for c, r, s in np.ndindex(2, 3, 2)
        )
        assert y[n, k, i, j] == pytest.approx(
            max(total + b[k] + residual[n, k, i, j], 0), abs=1e-12
        )


def test_conv2d_costs():
    values = [Value("x", (2, 4, 7, 6)), Value("w", (6, 2, 3, 2)), Value("b", (6,))]
    op = Conv2d(groups=2)
    ((shape, dtype),) = op.infer(values)
    y = Value("y", shape, dtype)
    assert op.terms(values) == 12
    assert op.cost(values, [y]).flops == 2 * y.size * 12
    assert op.cost(values, [y]).bytes == 4 * (336 + 72 + 6 + y.size)


@pytest.mark.parametrize(
    ("op", "shapes", "message"),
    [
        (Conv2d(), [(1, 3, 5, 5), (4, 2, 3, 3)], "a weight of 3 channels / 1 groups"),
        (Conv2d(groups=2), [(1, 4, 5, 5), (3, 2, 3, 3)], "filters in 2 groups, found [3, 2, 3, 3]"),
        (Conv2d(), [(1, 3, 5), (4, 3, 3)], "of 4 dimensions, found [1, 3, 5]"),
        (
            Conv2d(),
            [(1, 3, 2, 5), (4, 3, 3, 3)],
            "a window of at most the padded input, found 3 over 2",
        ),
        (Conv2d(stride=(0, 1)), [(1, 3, 5, 5), (4, 3, 3, 3)], "stride: expected 2 whole numbers"),
        (Conv2d(), [(1, 3, 5, 5), (4, 3, 3, 3), (3,)], "bias: expected shape [4], found [3]"),
        (Conv2d(), [(1, 3, 5, 5)], "expected 2 to 4 inputs, found 1"),
        (Linear(), [(2, 3, 4), (5, 13)], "a weight of 12 columns, found [5, 13]"),
        (Softmax(2), [(2, 3)], "axis: expected a dimension of 2, found 2"),
        (Normalize((1.0, 2.0)), [(1, 3, 4, 4)], "scale: expected one number or one per channel"),
        (Pad2d((1, 1, -1, 0)), [(1, 3, 4, 4)], "padding: expected 4 whole numbers"),
    ],
)
def test_what_does_not_fit_is_refused(op, shapes, message):
    with pytest.raises(InputError) as raised:
        op.infer([Value(f"x{i}", shape) for i, shape in enumerate(shapes)])
    assert message in str(raised.value)


def test_the_chain_reference_agrees(rng):
    x, w, b = rng.normal(size=(2, 3, 8, 9)), rng.normal(size=(4, 3, 3, 2)), rng.normal(size=4)
    np.testing.assert_array_equal(
        run(Conv2d((2, 1), (1, 2, 1, 2)), x, w, b), chain.conv2d(x, w, b, (2, 1), (1, 2))
    )
    np.testing.assert_array_equal(
        run(MaxPool2d((3, 2), (2, 2), (1, 1, 1, 1)), x), chain.max_pool2d(x, (3, 2), 2, 1)
    )
    np.testing.assert_array_equal(run(Pad2d((1, 2, 1, 2)), x), chain.pad2d(x, (1, 2)))
    w2 = rng.normal(size=(5, 216))
    np.testing.assert_array_equal(run(Linear(), x, w2), chain.linear(x.reshape(2, -1), w2))
    np.testing.assert_array_equal(run(Softmax(), x[0, 0]), chain.softmax(x[0, 0]))
    pixels = rng.integers(0, 256, (2, 3, 4, 4), np.uint8)
    np.testing.assert_array_equal(
        run(Normalize((0.5,), (-1.0,)), pixels), chain.normalize(pixels, 0.5, -1.0)
    )


def test_normalize_by_channel():
    y = run(Normalize((1.0, 2.0), (0.0, 10.0)), np.ones((1, 2, 1, 1), np.uint8))
    assert y.ravel().tolist() == [1, 12]


def test_conv3d_is_conv2d_in_every_plane(rng):
    x, w = rng.normal(size=(1, 2, 3, 6, 6)), rng.normal(size=(3, 2, 1, 3, 3))
    y = run(Conv3d(), x, w)
    for plane in range(3):
        np.testing.assert_allclose(
            y[:, :, plane], run(Conv2d(), x[:, :, plane], w[:, :, 0]), rtol=1e-12
        )


def test_max_pool2d_says_where(rng):
    x = rng.permutation(2 * 3 * 5 * 6).reshape(2, 3, 5, 6).astype(np.float32)
    for order, flat in (("row", x.ravel()), ("column", x.transpose(0, 1, 3, 2).ravel())):
        op = MaxPool2d((3, 2), (2, 1), (1, 0, 1, 1), (1, 2), indices=order)
        y, positions = run(op, x)
        np.testing.assert_array_equal(flat[positions], y)


def test_max_pool2d_of_integers():
    x = np.array([[[[-5, -7], [-9, -6]]]], np.int8)
    y = run(MaxPool2d((2, 2), (1, 1), (1, 1, 0, 0)), x)
    assert y.tolist() == [[[[-5, -5], [-5, -5]]]]


def test_log_softmax_is_the_logarithm(rng):
    x = rng.normal(size=(3, 4, 5))
    np.testing.assert_allclose(np.exp(run(LogSoftmax(1), x)), run(Softmax(1), x), rtol=1e-13)


UNARY = {
    kind: record
    for kind, record in operators.KINDS.items()
    if issubclass(record, Unary) and record.types in ("floats", "numbers")
}


@pytest.mark.parametrize("kind", sorted(UNARY))
def test_unary_functions_keep_shape_and_handle_extremes(kind):
    x = np.array([[-1e30, -3, -0.5, -0.0, 0.0, 0.25, 1, 2, 1e30, np.nan]], np.float32)
    y = run(UNARY[kind](), x)
    if y.dtype == bool:
        assert y.ravel().tolist() == [kind == "is_nan" and place == 9 for place in range(10)]
    elif kind not in ("thresholded_relu", "shrink"):
        assert np.isnan(y[0, -1])


def test_relu_and_clip_keep_integers():
    x = np.array([-200, -3, 0, 7], np.int16)
    assert run(Relu(), x).tolist() == [0, 0, 0, 7]
    assert run(Clip(-5, 5), x).tolist() == [-5, -3, 0, 5]
    assert run(Clip(), np.array([-128, 127], np.int8)).tolist() == [-128, 127]


def test_gelu_forms_have_their_own_functions():
    assert (Gelu().function, Gelu("tanh").function) == ("gelu", "gelu_tanh")


def test_floating_functions_refuse_integers():
    with pytest.raises(InputError, match="expected floats, found int64"):
        UNARY["exp"]().infer([Value("x", (2,), "int64")])


def test_reverse_sequence_reverses_so_many_of_each_row():
    x, lengths = np.arange(8).reshape(2, 4), np.array([3, 1])
    wanted = [[2, 1, 0, 3], [4, 5, 6, 7]]
    np.testing.assert_array_equal(ReverseSequence(0, 1).reference(x, lengths), wanted)
    np.testing.assert_array_equal(ReverseSequence(1, 0).reference(x.T, lengths).T, wanted)
    with pytest.raises(InputError, match=r"expected x \[batch, time, ...\] and lengths \[batch\]"):
        ReverseSequence().infer([Value("x", (2, 4), "int64"), Value("lengths", (2,), "int64")])


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, -1])
def test_lp_normalization_makes_norms_one_and_leaves_zeros(rng, p, axis):
    x = rng.standard_normal((3, 4)).astype(np.float32)
    x[(slice(None), 1) if axis == 0 else (1, slice(None))] = 0
    y = LpNormalization(axis, p).reference(x)
    norms = (np.abs(y) ** p).sum(axis)
    np.testing.assert_allclose(norms, [1, 0, 1, 1][: len(norms)] if axis == 0 else [1, 0, 1])
    np.testing.assert_array_equal(np.sign(y), np.sign(x))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_top_k_keeps_the_first_of_equals(data):
    """Few of many, and nearly all; with NaN, which is the greatest, and infinities."""
    size, k = data.draw(st.sampled_from([(1, 1), (7, 0), (7, 3), (40, 1), (40, 9), (40, 30)]))
    kind = data.draw(st.sampled_from([np.float32, np.int64, np.uint8]))
    some = [0, 1, 1, 2, 3] + [np.nan, np.inf, -np.inf] * (
        kind is np.float32 and data.draw(st.booleans())
    )
    rows = data.draw(st.lists(st.sampled_from(some), min_size=6 * size, max_size=6 * size))
    x, largest = np.array(rows).astype(kind).reshape(2, size, 3), data.draw(st.booleans())
    values, positions = run(TopK(k, 1, largest), x)
    for i, j in np.ndindex(2, 3):
        key = x[i, :, j].astype(np.float64)
        rank = np.where(np.isnan(key), np.inf, key), np.isnan(key)  # NaN above infinity
        sign = -1 if largest else 1
        order = np.lexsort((np.arange(size), sign * rank[0], sign * rank[1].astype(int)))[:k]
        np.testing.assert_array_equal(positions[i, :, j], order)
        np.testing.assert_array_equal(values[i, :, j], x[i, order, j])
