"""Resize: the positions that an output element is made of, exact by sizes, ONNX Runtime's by scales."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from onnx import helper
from onnx_models import model, one_node, onnxruntime_outputs, tensor

from cnn_engine import Engine
from cnn_engine.graph.onnx import load
from cnn_engine.operators.resize import COORDINATES, NEAREST, Resize

MOST = 64
#: Pairs of sizes: the small ones each to each, of the others a third, of every parity and divisor.
PAIRS = [
    (a, o)
    for a in range(1, MOST + 1)
    for o in range(1, MOST + 1)
    if max(a, o) <= 16 or (a + o) % 3 == 0 or o in (1, a - 1, a, a + 1)
]

#: Coordinates -> numerators and denominator of the exact positions of ``i`` where ``a`` positions become
#: ``o``.
EXACT = {
    "asymmetric": lambda i, a, o: (i * a, o),
    "half_pixel": lambda i, a, o: ((2 * i + 1) * a - o, 2 * o),
    "half_pixel_symmetric": lambda i, a, o: ((2 * i + 1) * a - o, 2 * o),
    "pytorch_half_pixel": lambda i, a, o: ((2 * i + 1) * a - o if o > 1 else 0 * i, 2 * o),
    "tf_half_pixel_for_nn": lambda i, a, o: ((2 * i + 1) * a, 2 * o),
    "align_corners": lambda i, a, o: (i * (a - 1), max(o - 1, 1)),
    # Of the whole image: from 0 to a - 1, or its middle.
    "tf_crop_and_resize": lambda i, a, o: (i * (a - 1), o - 1) if o > 1 else (i + a - 1, 2),
}

#: Rule -> the place of n / d.
ROUNDED = {
    "floor": lambda n, d: n // d,
    "ceil": lambda n, d: -(-n // d),
    "round_prefer_ceil": lambda n, d: (2 * n + d) // (2 * d),
    "round_prefer_floor": lambda n, d: -((d - 2 * n) // (2 * d)),
}


def whole_image(rank: int, coordinates: str) -> tuple[float, ...]:
    return (0.0,) * rank + (1.0,) * rank if coordinates == "tf_crop_and_resize" else ()


@pytest.mark.parametrize("coordinates", COORDINATES)
def test_the_nearest_place_by_sizes_is_exact(coordinates):
    roi = whole_image(1, coordinates)
    wrong = []
    for a, o in PAIRS:
        n, d = EXACT[coordinates](np.arange(o), a, o)
        op = Resize((o,), (Fraction(o, a),), "nearest", coordinates, roi=roi)
        for rule in NEAREST:
            wanted = ROUNDED[rule](n, d).clip(0, a - 1) if a != o or roi else np.arange(o)
            tables = replace(op, nearest=rule).tables((a,))
            found = tables[0][1][:, 0] if tables else np.arange(a)
            if not np.array_equal(found, wanted):
                wrong.append((rule, a, o))
    assert not wrong, (len(wrong), wrong[:5])


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_the_weights_by_sizes_are_those_of_the_exact_place(mode, coordinates):
    """Their sum is 1, and the sum of positions times weights is the place, which is whole where it is."""
    roi = whole_image(1, coordinates)
    for a, o in PAIRS[::3]:
        n, d = EXACT[coordinates](np.arange(o), a, o)
        op = Resize((o,), (Fraction(o, a),), mode, coordinates, cubic_a=-0.5, roi=roi)
        for _, positions, weights in op.tables((a,)):
            assert np.abs(weights.sum(axis=1) - 1).max() < 1e-14
            inside = (n % d == 0) & (n >= 0) & (n <= (a - 1) * d)
            chosen = positions[np.arange(o), weights.argmax(axis=1)]
            assert np.array_equal(chosen[inside], (n // d)[inside]), (a, o)
            if coordinates != "tf_crop_and_resize":  # which is in float32
                assert (weights[inside].max(axis=1) == 1).all(), (a, o)
            if mode == "linear":
                at = (positions * weights).sum(axis=1)
                assert np.abs(at - (n / d).clip(0, a - 1)).max() < 1e-5, (a, o)


HARD = [0.1, 1 / 3, 0.6, 0.7, 1.1, 1.2, 1.7, 2.4]  # float32 holds none of them
SCALES = [*HARD, *np.exp(np.random.default_rng(0).uniform(np.log(0.05), np.log(6), 80))]
ROI = np.array([0, 0.1, 0, 1, 0.85, 1], np.float32)  # of [1, N, 1]


def every_rule(scale: float, size: int):
    """A model of Resize by ``scale`` in all coordinates and all rules, and its input."""
    x = np.arange(size, dtype=np.float32).reshape(1, size, 1)
    names = [f"{c}.{n}" for c in COORDINATES for n in NEAREST]
    nodes = [
        helper.make_node(
            "Resize", ["x", "roi", "scales"], [name], mode="nearest", nearest_mode=name.split(".")[1],
            coordinate_transformation_mode=name.split(".")[0],
        )
        for name in names
    ]  # fmt: skip
    constants = {"roi": ROI, "scales": np.array([1, scale, 1], np.float32)}
    outputs = [tensor(name, None) for name in names]
    return model(nodes, [tensor("x", x.shape)], outputs, constants, 19), x


def test_sizes_and_nearest_places_by_scales_are_onnx_runtimes():
    """As far as something is resized: ONNX Runtime hands x on where all sizes stay, whatever the scales."""
    wrong, resized = [], 0
    # In float32, 10 * 0.7 is 7, though the float32 next to 0.7 is below it.
    cases = [(0.7, 10), *((scale, (60, 7, 33, 10)[i % 4]) for i, scale in enumerate(SCALES))]
    for scale, size in cases:
        proto, x = every_rule(scale, size)
        wanted = onnxruntime_outputs(proto, {"x": x})
        graph = load(proto)
        for node, y in zip(graph.nodes, wanted, strict=True):
            assert graph.values[node.outputs[0]].shape == y.shape, (scale, size)
            if y.shape != x.shape:
                resized += 1
                if not np.array_equal(node.op.reference(x), y):
                    wrong.append((node.outputs[0], scale, size))
    assert resized > 2000
    assert not wrong, (len(wrong), wrong[:5])


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize(
    "coordinates",
    [
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "asymmetric",
        "tf_crop_and_resize",
    ],
)
def test_sums_by_scales_are_onnx_runtimes(mode, coordinates, rng):
    """Far out a place in float32 is thousands of the float's units away from one in float64."""
    for scale in HARD:
        x = rng.standard_normal((1, 1, 999, 2)).astype(np.float32)
        roi = np.insert(np.insert(ROI, 3, 1), 0, 0)
        proto, inputs = one_node(
            "Resize", [x, roi, np.array([1, 1, scale, 1], np.float32)], 19, known=(1, 2), mode=mode,
            coordinate_transformation_mode=coordinates,
        )  # fmt: skip
        (wanted,) = onnxruntime_outputs(proto, inputs)
        found = load(proto).nodes[0].op.reference(x)
        assert np.abs(found - wanted).max() < 1e-5, scale


def test_before_opset_11_the_nearest_place_was_above_where_the_output_is_smaller():
    x = np.arange(40, dtype=np.float32).reshape(1, 1, 8, 5)
    for scale in (0.3, 0.6, 0.9, 1.3, 2.0, 3.7):
        proto, inputs = one_node(
            "Resize", [x, np.array([1, 1, scale, 1.7], np.float32)], 10, known=(1,)
        )
        (wanted,) = onnxruntime_outputs(proto, inputs)
        np.testing.assert_array_equal(load(proto).nodes[0].op.reference(x), wanted)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_engine_by_sizes(mode):
    """PyTorch's exporters write ``F.interpolate(size=...)`` so; x is its own positions."""
    x = np.arange(14 * 28, dtype=np.float32).reshape(1, 1, 14, 28)
    proto, inputs = one_node(
        "Resize", [x, None, None, np.array([1, 1, 18, 36])], 13, known=(3,), mode=mode,
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    with Engine(proto, device="cpu", threads=1) as engine:
        (found,) = engine.run(inputs).values()
    if mode == "nearest":
        rows, columns = np.arange(18) * 14 // 18, np.arange(36) * 28 // 36
        np.testing.assert_array_equal(found[0, 0], x[0, 0][rows][:, columns])
    else:
        np.testing.assert_allclose(found[0, 0, ::9, ::9], x[0, 0, ::7, ::7], rtol=1e-6)


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_ratios_that_are_kept_are_exact(policy):
    """7 of 3 and 7 of 6: 3 positions by 7/6 are 3.5, and by 7/3 are 7; ties round up."""
    x = np.arange(18, dtype=np.float32).reshape(1, 1, 3, 6)
    proto, _ = one_node(
        "Resize", [x, None, None, np.array([7, 7])], 19, known=(3,), axes=[2, 3],
        keep_aspect_ratio_policy=policy, nearest_mode="floor",
        coordinate_transformation_mode="asymmetric",
    )  # fmt: skip
    sizes, ratio = {
        "not_larger": ((4, 7), Fraction(7, 6)),
        "not_smaller": ((7, 14), Fraction(7, 3)),
    }[policy]
    graph = load(proto)
    found = graph.nodes[0].op.reference(x)[0, 0]
    positions = [
        np.minimum(np.arange(size) * ratio.denominator // ratio.numerator, of - 1)
        for size, of in zip(sizes, (3, 6), strict=True)
    ]
    np.testing.assert_array_equal(found, x[0, 0][positions[0]][:, positions[1]])


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int64])
@pytest.mark.parametrize("scales", [(2, 2), (3, 2), (1, 2), (2, 1), (4, 3)])
@pytest.mark.parametrize("shape", [(1, 3, 5, 7), (2, 1, 1, 1), (2, 4, 3, 32)])
def test_whole_scales_repeat(dtype, scales, shape, rng):
    """Doubled rows and columns have loops of their own in the kernel."""
    x = rng.integers(0, 200, shape).astype(dtype)
    proto, inputs = one_node(
        "Resize", [x, None, np.float32([1, 1, *scales])], 13, known=(2,), mode="nearest",
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    with Engine(proto, device="cpu", threads=1) as engine:
        (found,) = engine.run(inputs).values()
    np.testing.assert_array_equal(found, x.repeat(scales[0], 2).repeat(scales[1], 3))
