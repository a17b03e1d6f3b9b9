"""The check against the reference: rounding passes it at any depth, one wrong weight does not."""

from __future__ import annotations

from dataclasses import replace

import graphs
import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import model, tensor

from cnn_engine import Engine
from cnn_engine.engine import check as checks
from cnn_engine.graph import reference
from cnn_engine.operators.binary import Div, Mul
from cnn_engine.operators.reduce import ReduceMax
from cnn_engine.operators.shaping import Slice

DEEP = graphs.resnet((3, 4, 6, 3), (1, 3, 32, 32), width=8)  # the layers of ResNet-50, narrower


@pytest.fixture
def images(rng):
    return rng.standard_normal((4, 3, 32, 32)).astype(np.float32)


@pytest.mark.parametrize(
    ("variant", "reduction"), [("auto", None), ("if", False), ("if", True), ("pad", True)]
)
def test_a_deep_network_passes(images, variant, reduction):
    with Engine(DEEP, device="cpu", variant=variant, reduction=reduction, threads=1) as e:
        found = e.check(images)
    assert found.passed
    assert found.max_abs_diff > found.tolerance / 1000, "a limit that no error could reach"
    assert found.images == len(images)


def wrong(engine: Engine, images: np.ndarray, name: str, weight: np.ndarray) -> checks.Check:
    """Checks an engine against the graph with one other weight."""
    graph = replace(DEEP, constants={**DEEP.constants, name: weight})
    return checks.check(engine.predict, lambda batch, _: graph.with_batch(batch), images, "float32")


def test_one_wrong_weight_fails_in_nearly_any_layer(images):
    caught = []
    names = [name for name, array in DEEP.constants.items() if array.ndim == 4]
    with Engine(DEEP, device="cpu", threads=1) as e:
        for name in names[::5]:
            weight = DEEP.constants[name].copy()
            weight.flat[np.abs(weight).argmax()] = 0
            found = wrong(e, images, name, weight)
            caught.append(not found.passed)
            # What is behind a relu that is never on changes nothing.
            assert found.passed or found.max_abs_diff > 10 * found.tolerance
    assert len(names) > 50
    assert np.mean(caught) >= 0.7, caught


def test_a_shifted_tap_fails(images):
    weight = np.roll(DEEP.constants["w0"], 1, axis=3)
    with Engine(DEEP, device="cpu", threads=1) as e:
        assert not wrong(e, images, "w0", weight).passed


def test_nan_fails(images):
    with Engine(DEEP, device="cpu", threads=1) as e:
        found = checks.check(lambda x: e.predict(x) * np.nan, e._graph, images, "float32")
    assert not found.passed


def test_what_is_not_finite_in_the_reference_must_be_so_in_the_outputs(images):
    """Columns of 0 / 0, 1 / 0, -1 / 0, 1e39 (float32 holds it as infinity) and 1."""
    b = graphs.Builder(images.shape)
    rows = b.add(ReduceMax((2, 3), keepdims=False), b.add(Slice((0,), (1,), (1,), (1,)), "images"))
    for op, row in ((Mul(), [0, 1, -1, 1e19, 1]), (Div(), [0, 0, 0, 1e-20, 1])):
        b.constants[op.kind] = np.array([row], np.float32)
        rows = b.add(op, rows, op.kind)
    graph = b.graph()
    images[:, 0] = np.abs(images[:, 0]) + 1
    with Engine(graph, device="cpu", threads=1) as e:
        assert e.check(images).passed
        assert e.check(images).not_finite == 3 * len(images)
        right = e.predict(images)
        for place in range(5):
            for value in (0.0, np.inf, -np.inf, np.nan):
                wrong = right.copy()
                wrong[-1, place] = value
                found = checks.check(lambda _, rows=wrong: rows, e._graph, images, "float32")
                same = np.array_equal(wrong, right, equal_nan=True)
                assert found.passed == same, (place, value)


def test_operands_at_the_edge_of_a_function_are_allowed_what_rounding_does(rng):
    """(-2) ** 2.0001 is NaN: trials that are NaN once allowed nothing behind such a node."""
    node = helper.make_node
    made = model(
        [node("Pow", ["x", "two"], ["p"]), node("MatMul", ["p", "w"], ["y"]), node("Acos", ["o"], ["z"])],
        [tensor("x", ["n", 64]), tensor("o", ["n", 1])],
        [tensor("y", ["n", 64]), tensor("z", ["n", 1])],
        {"two": np.float32(2), "w": rng.normal(size=(64, 64)).astype(np.float32)},
    )  # fmt: skip
    x = rng.normal(size=(4, 64)).astype(np.float32)
    with Engine(made, device="cpu", threads=1) as e:
        found = e.check(e.samples({"x": x, "o": np.ones((4, 1), np.float32)}))
        largest = np.abs(e.run({"x": x, "o": np.ones((4, 1), np.float32)})["y"]).max()
    assert found.passed
    assert found.outputs[0].tolerance > 8 * checks.SUM_ROUNDING * largest


def heads(rng) -> onnx.ModelProto:
    node = helper.make_node
    weights = {"w": rng.normal(size=(5, 3, 3, 3)).astype(np.float32)}
    return model(
        [node("Conv", ["x", "w"], ["classes"], pads=[1] * 4), node("Sigmoid", ["classes"], ["s"]),
         node("ReduceMax", ["s", "one"], ["mask"]), node("ArgMax", ["classes"], ["best"], axis=1)],
        [tensor("x", ["n", 3, 8, 8])],
        [tensor("classes", ["n", 5, 8, 8]), tensor("mask", ["n", 1, 8, 8]),
         tensor("best", ["n", 1, 8, 8], onnx.TensorProto.INT64)],
        {**weights, "one": np.array([1])},
    )  # fmt: skip


def test_every_output_is_compared_and_said_where_it_may_flip(rng):
    images = rng.standard_normal((2, 3, 8, 8)).astype(np.float32)
    images[1, :, :4] = 0  # classes of equal logits, and a mask of exactly one half
    with Engine(heads(rng), device="cpu", threads=1) as e:
        found = e.check(images)
        right = e.predict(images).to_dict()
        assert found.passed
        assert [one.name for one in found.outputs] == ["classes", "mask", "best"]
        classes, mask, best = found.outputs
        assert (classes.reads, classes.places) == ("largest", 2 * 64)
        assert (mask.reads, mask.places) == ("border", 2 * 64)
        assert 24 <= classes.close < 64
        assert 24 <= mask.close < 64
        assert best.max_abs_diff == 0
        for name, wrong in (
            ("classes", right["classes"] + np.float32(1e-3)),
            ("mask", np.roll(right["mask"], 1, axis=3)),
            ("best", np.where(np.arange(8) == 3, 0, right["best"])),
        ):
            some = {**right, name: wrong}
            found = checks.check(lambda _, some=some: some, e._graph, images, "float32")
            assert not found.passed
            assert [one.passed for one in found.outputs] == [
                one.name != name for one in found.outputs
            ]


def test_coarser_types_are_allowed_more():
    images = np.random.default_rng(0).integers(0, 256, (16, 3, 32, 32), dtype=np.uint8)
    with Engine("cifar10", device="cpu") as e:
        graph = e._graph(len(images), True)
        outputs = reference.reference(graph, {"images": images})
        limits = [
            checks.tolerance(graph, {"images": images}, outputs, dtype)["probabilities"]
            for dtype in ("float32", "float16", "bfloat16")
        ]
    assert limits[0] < 1e-4 < limits[1] < limits[2] < 0.3


def test_large_networks_are_checked_on_fewer_images():
    assert checks.images_for(8_000_000, 256) == 256
    assert checks.images_for(8_000_000_000, 256) == 2
    assert checks.images_for(10**12, 256) == 1


def test_a_check_takes_the_images_that_it_can_afford(monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (9, 3, 32, 32), dtype=np.uint8)
    with Engine("cifar10", device="cpu") as e:
        graph = e._graph(1, True)
        flops = sum(graph.cost_of(node).flops for node in graph.nodes)
        for affordable, taken in ((3.5, 3), (0.5, 1), (100, 9)):
            monkeypatch.setattr(checks, "MOST_FLOPS", affordable * flops)
            assert e.check(images).images == taken
            assert e.check(images[:0]).images == 0
        # A model for batches of four is checked on whole ones: one at least.
        for affordable, given, taken in ((3.5, 9, 4), (0.5, 9, 4), (100, 9, 8), (100, 3, 0)):
            monkeypatch.setattr(checks, "MOST_FLOPS", affordable * flops)
            found = checks.check(e.predict, e._graph, images[:given], "float32", batch=4)
            assert found.images == taken
