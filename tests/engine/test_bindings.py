"""What a compiled function says of arguments that it cannot take; the Python above it checks the rest."""

from __future__ import annotations

import numpy as np
import pytest

from cnn_engine import _cpu


def call(*replaced: tuple[int, object]) -> None:
    x = np.array([-1.0, 2.0], np.float32)
    arguments: list[object] = [
        _cpu.address_of(x),
        _cpu.address_of(x),
        _cpu.ElementwiseShape(2, 4),
        1,
    ]
    for index, value in replaced:
        arguments[index] = value
    _cpu.relu(*arguments)
    np.testing.assert_array_equal(x, [0.0, 2.0])


def test_numbers_of_numpy_are_numbers():
    call()
    call((3, np.int64(1)))


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, 1.5),
        (0, -1),
        (0, "x"),
        (2, None),
        (2, 3),
        (2, _cpu.SoftmaxShape(1, 2)),
        (3, 2**31),
        (3, None),
    ],
)
def test_arguments_of_other_types(index, value):
    with pytest.raises(TypeError, match="relu: expected arguments of its types, found "):
        call((index, value))


def test_a_number_of_arguments():
    with pytest.raises(TypeError, match="^relu: expected 4 arguments, found 2$"):
        _cpu.relu(1, 2)
    with pytest.raises(TypeError, match="keyword"):
        _cpu.relu(1, 2, 3, threads=1)


def test_what_c_throws():
    shape = _cpu.Conv2dShape(1, 3, 8, 8, 4, 3, 3, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="tiled"):
        _cpu.conv2d(0, 0, 0, 0, shape, _cpu.Conv2dVariant.tiled, False, 1)


def test_shapes_say_what_they_cost():
    shape = _cpu.Conv2dShape(1, 3, 8, 8, 4, 3, 3, 1, 1, 1, 1)
    assert (shape.out_h, shape.out_w, shape.weight_size) == (8, 8, 4 * 27)
    assert shape.flops == 2 * shape.output_size * 27
    assert not hasattr(_cpu.Overflow(0, 0), "flops")


def test_layers_that_are_no_rows_of_ten():
    with pytest.raises(TypeError, match="layer: expected 10 values, found 2"):
        _cpu.FusedNetwork.why_not((1, 8, 8), 1.0, 0.0, [("relu", 1)], "float32")
    with pytest.raises(TypeError, match="shape: expected 3 values, found 2"):
        _cpu.FusedNetwork.why_not((1, 8), 1.0, 0.0, [], "float32")
