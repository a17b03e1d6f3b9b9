"""Operators that read between pixels or put windows back, beside ONNX Runtime and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
from onnx_models import one_node, onnxruntime_outputs
from test_kernel_rows import check, place, run  # noqa: F401

from cnn_engine import Engine
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.errors import InputError
from cnn_engine.graph.onnx import load
from cnn_engine.graph.reference import reference
from cnn_engine.operators.operator import Value
from cnn_engine.operators.overlap import Col2im, MaxUnpool
from cnn_engine.operators.sampling import DeformConv, GridSample, RoiAlign


def some(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def agrees(proto, inputs, terms, scale=4.0):
    """Asserts that the engine, the reference and ONNX Runtime agree."""
    (wanted,) = onnxruntime_outputs(proto, inputs)
    found = Engine(proto, device="cpu").run(inputs)["y0"]
    exact = reference(load(proto), inputs)["y0"]
    allowed = tolerances.sum_of_products(terms, np.full(wanted.shape, scale))
    assert found.shape == wanted.shape
    tolerances.assert_close(found, exact, allowed)
    tolerances.assert_close(wanted, exact, allowed)


# -- GridSample ----------------------------------------------------------------------------------

MODES = {16: ("bilinear", "nearest", "bicubic"), 20: ("linear", "nearest", "cubic")}


@pytest.mark.parametrize("opset", MODES)
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [0, 1])
def test_grids_of_images(rng, opset, mode, padding, align):
    x = some(rng, 2, 3, 5, 7)
    grid = rng.uniform(-1.9, 1.9, (2, 4, 6, 2)).astype(np.float32)
    proto, inputs = one_node(
        "GridSample", [x, grid], opset, mode=MODES[opset][mode], padding_mode=padding,
        align_corners=align,
    )  # fmt: skip
    # A place's rounding error of some units counts with the slopes of the image.
    agrees(proto, inputs, 16, 64.0)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [0, 1])
def test_grids_of_volumes(rng, mode, padding, align):
    x = some(rng, 2, 2, 3, 4, 5)
    grid = rng.uniform(-1.6, 1.6, (2, 2, 3, 4, 3)).astype(np.float32)
    proto, inputs = one_node(
        "GridSample", [x, grid], 20, mode=mode, padding_mode=padding, align_corners=align
    )
    agrees(proto, inputs, 8, 64.0)


def test_halves_go_to_the_even_pixel():
    x = np.float32([[[[1, 2, 3, 4]]]])
    grid = np.float32([[[[-0.75, 0], [-0.5, 0], [0, 0], [0.5, 0]]]])  # pixels 0, 0.5, 1.5, 2.5
    y = GridSample("nearest").reference(x, grid)
    np.testing.assert_array_equal(y.ravel(), [1, 1, 3, 3])


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_places_far_away_or_not_numbers_are_outside(mode, padding):
    x = np.ones((1, 1, 3, 4))
    far = np.float32([np.nan, np.inf, -np.inf, 1e30, -1e30])
    grid = np.stack(np.meshgrid(far, far), axis=-1)[None]
    y = GridSample(mode, padding).reference(x, grid)
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y, 0 if padding == "zeros" else 1, atol=1e-12)


def test_infinite_pixels_beside_a_place_do_not_count():
    x = np.float32([[[[1, np.inf, 2]]]])
    grid = np.float32([[[[-1, 0], [1, 0]]]])
    np.testing.assert_array_equal(GridSample(align_corners=True).reference(x, grid).ravel(), [1, 2])


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize(
    ("sizes", "positions"), [((9,), (130,)), ((5, 7), (9, 17)), ((1, 1), (3, 2)), ((3, 4, 5), (2, 5, 7)),
                          ((4, 4), (0, 3))],
)  # fmt: skip
def test_kernels_of_grids(place, rng, mode, padding, sizes, positions):  # noqa: F811
    rank = len(sizes)
    if mode == "cubic" and rank == 3:
        pytest.skip("NumPy runs it")
    for align in (False, True):
        x = some(rng, 2, 11, *sizes)
        grid = rng.uniform(-2.5, 2.5, (2, *positions, rank)).astype(np.float32)
        grid.reshape(-1)[::19] = np.nan
        steps = check(
            place, GridSample(mode, padding, align), x, grid,
            bound=lambda wanted: tolerances.sum_of_products(16, 8 + np.abs(wanted)),
        )  # fmt: skip
        assert "grid_sample" in steps


def test_kernels_of_grids_read_no_pixel_without_weight(place):  # noqa: F811
    x = np.float32([[[[1, np.inf, 2]]]])
    grid = np.float32([[[[-1, 0], [1, 0], [5, 5]]]])
    found, _ = run(place, GridSample(align_corners=True), x, grid)
    np.testing.assert_array_equal(found[0].ravel(), [1, 2, 0])


@pytest.mark.parametrize(
    ("op", "shapes", "message"),
    [
        (GridSample("area"), [(1, 1, 2, 2), (1, 2, 2, 2)], "mode: expected nearest, linear or cubic"),
        (GridSample(), [(1, 1, 2, 2), (1, 2, 2, 3)], r"a grid \[N, ..., 2\]"),
        (GridSample(), [(2, 1, 2, 2), (1, 2, 2, 2)], r"a grid \[N, ..., 2\]"),
        (RoiAlign(2, 2), [(1, 1, 2, 2), (3, 5)], r"expected regions \[R, 4\]"),
        (DeformConv(), [(1, 4, 5, 5), (2, 3, 3, 3), (1, 18, 3, 3)], "weight: expected"),
        (DeformConv(), [(1, 4, 5, 5), (2, 4, 3, 3), (1, 9, 3, 3)], r"offset: expected \[1, 18, 3, 3\]"),
        (Col2im((5, 5), (2, 2), (1, 1), (0,) * 4, (1, 1)), [(1, 8, 15)], r"expected x \[N, C \* 4, 16\]"),
        (MaxUnpool((4, 4), (3, 4)), [(1, 1, 2, 2), (1, 1, 2, 2)], r"at least \[4, 4\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit(op, shapes, message):
    values = [Value(f"x{i}", shape) for i, shape in enumerate(shapes)]
    if isinstance(op, RoiAlign):
        values.append(Value("i", (3,), "int64"))
    if isinstance(op, MaxUnpool):
        values[1] = Value("i", shapes[1], "int64")
    with pytest.raises(InputError, match=message):
        op.infer(values)


# -- RoiAlign ------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [10, 16])
@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("half", [True, False])
def test_regions(rng, opset, samples, half):
    x = some(rng, 2, 3, 9, 11)
    corner = rng.uniform(-4, 18, (6, 2))
    rois = np.concatenate([corner, corner + rng.uniform(0.2, 12, (6, 2))], 1).astype(np.float32)
    images = np.int64([0, 1, 1, 0, 0, 1])
    more = {}
    if opset == 16:
        more["coordinate_transformation_mode"] = "half_pixel" if half else "output_half_pixel"
    proto, inputs = one_node(
        "RoiAlign", [x, rois, images], opset, output_height=3, output_width=2, spatial_scale=0.5,
        sampling_ratio=samples, **more,
    )  # fmt: skip
    agrees(proto, inputs, 64, 16.0)


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("half", [True, False])
def test_kernels_of_regions(rng, samples, mode, half):
    x = some(rng, 3, 5, 8, 13)
    corner = rng.uniform(-6, 30, (9, 2))
    rois = np.concatenate([corner, corner + rng.uniform(-1, 70, (9, 2))], 1).astype(np.float32)
    images = rng.integers(0, 3, 9)
    op = RoiAlign(2, 3, samples, 0.5, mode, half)
    steps = check(
        CpuDevice(), op, x, rois, images,
        bound=lambda wanted: tolerances.sum_of_products(64, 4 + np.abs(wanted)),
    )  # fmt: skip
    assert steps == ["roi_align"]


def test_the_largest_of_a_region_by_hand():
    x = np.arange(16.0).reshape(1, 1, 4, 4)
    y = RoiAlign(1, 1, 1, 1.0, "max", False).reference(x, np.float32([[1, 1, 2, 2]]), np.int64([0]))
    assert y.ravel() == 10 * 0.25  # of the four around (1.5, 1.5), each a quarter


def test_regions_of_images_that_are_not_there():
    rois = np.float32([[0, 0, 1, 1]])
    x = np.zeros((1, 1, 2, 2), np.float32)
    proto, inputs = one_node("RoiAlign", [x, rois, np.int64([1])], 16)
    with pytest.raises(InputError, match="batch_indices: expected images of 1, found 1"):
        Engine(proto, device="cpu").run(inputs)
    for wrong in (np.nan, np.inf, 1e9):
        inputs |= {"x1": np.float32([[0, 0, 1, wrong]]), "x2": np.int64([0])}
        with pytest.raises(InputError, match=r"rois: expected regions of up to 8192 pixels a side"):
            Engine(proto, device="cpu").run(inputs)


# -- DeformConv ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups", "offset_groups"),
    [
        ((1, 1), (0, 0, 0, 0), (1, 1), 1, 1),
        ((2, 1), (1, 2, 1, 0), (1, 2), 2, 1),
        ((1, 2), (2, 1, 2, 1), (2, 1), 1, 2),
        ((1, 1), (1, 1, 1, 1), (1, 1), 2, 4),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_moved_taps(rng, stride, padding, dilation, groups, offset_groups, masked):
    x, weight = some(rng, 2, 4, 7, 8), some(rng, 6, 4 // groups, 3, 2)
    op = DeformConv(stride, padding, dilation, groups, offset_groups)
    sizes = [
        (size + before + after - step * (taps - 1) - 1) // by + 1
        for size, before, after, step, taps, by in zip(
            (7, 8), padding[:2], padding[2:], dilation, (3, 2), stride, strict=True
        )
    ]
    offset = some(rng, 2, offset_groups * 12, *sizes) * 2
    arrays = [x, weight, offset, some(rng, 6)]
    if masked:
        arrays.append(rng.random((2, offset_groups * 6, *sizes)).astype(np.float32))
    proto, inputs = one_node(
        "DeformConv", arrays, 19, kernel_shape=[3, 2], strides=stride, pads=padding,
        dilations=dilation, group=groups, offset_group=offset_groups,
    )  # fmt: skip
    assert load(proto).nodes[0].op == op
    found = Engine(proto, device="cpu").run(inputs)["y0"]
    wanted = _by_taps(op, *(np.float64(a) for a in arrays))
    tolerances.assert_close(found, wanted, tolerances.sum_of_products(24, 20 + np.abs(wanted)))


def _by_taps(op, x, weight, offset, bias, mask=None):
    """A plain loop over everything."""
    (images, channels, height, width), (filters, depth, rows, columns) = x.shape, weight.shape
    y = np.zeros((images, filters, *offset.shape[2:]))
    shared, each = channels // op.offset_groups, filters // op.groups

    def pixel(n, c, i, j):
        return x[n, c, i, j] if 0 <= i < height and 0 <= j < width else 0.0

    for n, m, i, j in np.ndindex(y.shape):
        y[n, m, i, j] = bias[m]
        for d, r, s in np.ndindex(depth, rows, columns):
            c = m // each * depth + d
            tap = (c // shared * rows + r) * columns + s
            v = i * op.stride[0] - op.padding[0] + r * op.dilation[0] + offset[n, 2 * tap, i, j]
            h = j * op.stride[1] - op.padding[1] + s * op.dilation[1] + offset[n, 2 * tap + 1, i, j]
            a, b = int(np.floor(v)), int(np.floor(h))
            t, u = v - a, h - b
            value = (1 - t) * ((1 - u) * pixel(n, c, a, b) + u * pixel(n, c, a, b + 1))
            value += t * ((1 - u) * pixel(n, c, a + 1, b) + u * pixel(n, c, a + 1, b + 1))
            y[n, m, i, j] += (
                weight[m, d, r, s] * value * (1 if mask is None else mask[n, tap, i, j])
            )
    return y


def test_no_offset_is_a_convolution(rng):
    x, weight = some(rng, 1, 4, 6, 6), some(rng, 2, 4, 3, 3)
    offset = np.zeros((1, 18, 4, 4), np.float32)
    deformed, inputs = one_node("DeformConv", [x, weight, offset], 19)
    plain, _ = one_node("Conv", [x, weight], 19)
    (wanted,) = onnxruntime_outputs(plain, {"x0": x, "x1": weight})
    found = Engine(deformed, device="cpu").run(inputs)["y0"]
    tolerances.assert_close(found, wanted, tolerances.sum_of_products(36, 20 + np.abs(wanted)))


# -- windows and maxima --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "kernel", "strides", "pads", "dilations"),
    [
        ((5, 6), (2, 3), (1, 1), (0, 0, 0, 0), (1, 1)),
        ((6, 7), (2, 2), (2, 1), (1, 0, 1, 1), (1, 2)),
    ],
)
def test_windows_are_added_up(rng, image, kernel, strides, pads, dilations):
    op = Col2im(image, kernel, strides, pads, dilations)
    x = some(rng, 2, 3 * kernel[0] * kernel[1], np.prod(op._windows()))
    arrays = [x, np.int64(image), np.int64(kernel)]
    proto, inputs = one_node(
        "Col2Im", arrays, 18, known=(1, 2), strides=strides, pads=pads, dilations=dilations
    )
    agrees(proto, inputs, 6, 6.0)


def test_maxima_go_back_to_where_they_were(rng):
    x = some(rng, 2, 3, 6, 8)
    pool, inputs = one_node("MaxPool", [x], 12, outputs=2, kernel_shape=[2, 2], strides=[2, 2])
    y, positions = onnxruntime_outputs(pool, inputs)
    back, fed = one_node("MaxUnpool", [y, positions], 11, kernel_shape=[2, 2], strides=[2, 2])
    (wanted,) = onnxruntime_outputs(back, fed)
    np.testing.assert_array_equal(Engine(back, device="cpu").run(fed)["y0"], wanted)
    with pytest.raises(InputError, match="indices: expected positions of 288, found 400"):
        Engine(back, device="cpu").run(
            {**fed, "x1": np.where(positions == positions.max(), 400, positions)}
        )


# -- outputs whose sizes their inputs' elements say ----------------------------------------------


@pytest.mark.parametrize("centred", [0, 1])
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_boxes_that_overlap_are_left_out(rng, centred, threshold):
    boxes = rng.uniform(0, 4, (2, 12, 4)).astype(np.float32)
    scores = np.round(rng.random((2, 3, 12)), 1).astype(np.float32)  # some are equal
    arrays = [boxes, scores, np.int64([5]), np.float32([0.4])]
    if threshold is not None:
        arrays.append(np.float32([threshold]))
    known = tuple(range(len(arrays)))
    proto, _ = one_node("NonMaxSuppression", arrays, 11, known=known, center_point_box=centred)
    (wanted,) = onnxruntime_outputs(proto, {})
    graph = load(proto)
    np.testing.assert_array_equal(graph.constants["y0"], wanted)


def test_no_box_unless_a_number_of_them_is_given(rng):
    arrays = [rng.random((1, 3, 4), np.float32), rng.random((1, 1, 3), np.float32)]
    proto, _ = one_node("NonMaxSuppression", arrays, 11, known=(0, 1))
    assert load(proto).constants["y0"].shape == (0, 3)


@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_unique_elements(rng, ordered, axis):
    x = rng.integers(0, 3, (5, 4)).astype(np.float32)
    more = {} if axis is None else {"axis": axis}
    proto, _ = one_node("Unique", [x], 11, outputs=4, known=(0,), sorted=ordered, **more)
    graph = load(proto)
    for index, wanted in enumerate(onnxruntime_outputs(proto, {})):
        np.testing.assert_array_equal(graph.constants[f"y{index}"], wanted)
