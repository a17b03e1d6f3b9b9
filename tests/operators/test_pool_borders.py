"""Pools at the border: windows larger than the image, without a place in it, and of its lowest numbers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from onnx import helper
from onnx_models import model, one_node, onnxruntime_outputs, tensor

from cnn_engine import Engine
from cnn_engine.errors import InputError
from cnn_engine.graph.onnx import load
from cnn_engine.graph.reference import reference

POOLS = [
    ("MaxPool", {}),
    ("AveragePool", {}),
    ("AveragePool", {"count_include_pad": 1}),
    ("LpPool", {}),
]
KERNELS = (1, 2, 3, 4, 6)


def windows(size: int):
    """All of few kernels, strides, paddings, dilations and ceil modes that give an output of ``size``."""
    for kernel, step, pads, spread, up in product(
        KERNELS, (1, 2, 3, 5), ((0, 0), (1, 0), (0, 1), (1, 1), (2, 2), (0, 3)), (1, 2, 3), (0, 1)
    ):
        free = size + sum(pads) - spread * (kernel - 1) - 1
        if max(pads) < kernel and free > -step:
            yield {
                "kernel_shape": [kernel], "strides": [step], "pads": list(pads), "dilations": [spread],
                "ceil_mode": up,
            }  # fmt: skip


@pytest.mark.parametrize(("operator", "more"), POOLS, ids=str)
def test_small_images_are_pooled_as_onnx_runtime_does(operator, more, rng):
    """MaxPool's windows without a place are apart: -inf here and in PyTorch, the lowest float there."""
    for size in (1, 2, 3, 5):
        x = rng.standard_normal((2, 1, size)).astype(np.float32)
        cases = list(windows(size))
        nodes = [
            helper.make_node(operator, ["x"], [f"y{i}"], **case, **more)
            for i, case in enumerate(cases)
        ]
        outputs = [tensor(f"y{i}", None) for i in range(len(cases))]
        proto = model(nodes, [tensor("x", x.shape)], outputs, opset=19)
        found = reference(load(proto), {"x": x})
        wanted = onnxruntime_outputs(proto, {"x": x})
        assert len(cases) > 100
        for case, y, z in zip(cases, found.values(), wanted, strict=True):
            lowest = np.where(np.isneginf(y), np.finfo(np.float32).min, y)
            np.testing.assert_allclose(lowest, z, rtol=1e-6, atol=1e-6, err_msg=f"{size}: {case}")


@pytest.mark.parametrize(("operator", "more"), POOLS, ids=str)
@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        ((1, 40), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ((1, 7), {"kernel_shape": [3, 3], "strides": [3, 2], "ceil_mode": 1}),
        ((3, 5), {"kernel_shape": [5, 2], "strides": [3, 1], "dilations": [1, 3]}),
        ((1, 1), {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1], "dilations": [1, 1]}),
    ],
    ids=str,
)  # fmt: skip
def test_engine_pools_small_images(operator, more, sizes, window, rng):
    for channels in (3, 32):  # channels side by side where they fill lanes
        x = rng.standard_normal((2, channels, *sizes)).astype(np.float32)
        proto, inputs = one_node(operator, [x], 19, **window, **more)
        (wanted,) = onnxruntime_outputs(proto, inputs)
        if more and window["kernel_shape"][0] > sizes[0] + 2 * ("pads" in window):
            # In two dimensions ONNX Runtime counts what is behind the padding; in one it does not.
            (wanted,) = reference(load(proto), inputs).values()
        with Engine(proto, device="cpu", threads=1) as engine:
            (found,) = engine.run(inputs).values()
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [(7,), (5, 6), (3, 4, 5)])
def test_norms_of_whole_images(p, sizes, rng):
    x = rng.standard_normal((2, 3, *sizes)).astype(np.float32)
    proto, inputs = one_node("GlobalLpPool", [x], 17, p=p)
    (wanted,) = onnxruntime_outputs(proto, inputs)
    (found,) = Engine(proto, device="cpu").run(inputs).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    with pytest.raises(InputError, match="p: expected at least 1, found 0"):
        load(one_node("GlobalLpPool", [x], 17, p=0)[0])


def test_a_mean_without_a_place_is_zero():
    """Places -1 and 1 of an image of one: by the kernel, too."""
    x = np.full((1, 2, 1, 1), 7, np.float32)
    window = {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1], "dilations": [2, 2]}
    proto, inputs = one_node("AveragePool", [x], 19, **window)
    with Engine(proto, device="cpu", threads=1) as engine:
        (found,) = engine.run(inputs).values()
    np.testing.assert_array_equal(found, onnxruntime_outputs(proto, inputs)[0])
    np.testing.assert_array_equal(found, np.zeros((1, 2, 1, 1)))


def test_a_window_that_is_a_stride_too_large_is_refused():
    proto, _ = one_node(
        "MaxPool", [np.ones((1, 1, 1, 4), np.float32)], kernel_shape=[3, 2], strides=[2, 2]
    )
    with pytest.raises(
        InputError, match="expected a window of at most the padded input, found 3 over 1"
    ):
        load(proto)


LOWEST = [(np.uint8, 0), (np.int8, -128), (np.float32, -np.inf), (np.float32, np.nan)]


@pytest.mark.parametrize(("dtype", "value"), LOWEST, ids=str)
@pytest.mark.parametrize("order", [0, 1])
def test_places_of_the_lowest_number_are_in_the_image(dtype, value, order):
    x = np.full((2, 2, 4, 5), value, dtype)
    proto, inputs = one_node(
        "MaxPool", [x], 12, outputs=2, kernel_shape=[3, 3], pads=[1] * 4, storage_order=order
    )
    y, positions = reference(load(proto), inputs).values()
    np.testing.assert_array_equal(y, x)
    step = 1 if np.isnan(value) else -1  # the last or the first of a window
    rows, columns = ((np.arange(size) + step).clip(0, size - 1) for size in (4, 5))
    wanted = rows[:, None] * 5 + columns if order == 0 else rows[:, None] + 4 * columns
    wanted = 20 * np.arange(4).reshape(2, 2, 1, 1) + wanted
    np.testing.assert_array_equal(positions, wanted)
    if not np.isnan(value):
        np.testing.assert_array_equal(positions, onnxruntime_outputs(proto, inputs)[1])


def test_places_are_pytorchs_among_numbers_that_are_not(rng):
    torch = pytest.importorskip("torch")
    x = rng.choice(np.float32([np.nan, -np.inf, np.inf, 0, 1]), (3, 1, 7, 8))
    proto, inputs = one_node(
        "MaxPool", [x], 12, outputs=2, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 1, 1, 1]
    )
    y, positions = reference(load(proto), inputs).values()
    wanted, at = torch.nn.functional.max_pool2d(
        torch.from_numpy(x), (3, 2), (2, 1), 1, return_indices=True
    )
    np.testing.assert_array_equal(y, wanted.numpy())
    np.testing.assert_array_equal(positions, at.numpy() + 56 * np.arange(3).reshape(3, 1, 1, 1))
