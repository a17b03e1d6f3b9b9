"""One engine for all sizes that a file leaves open: the same bits as an engine of each size."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx_models import model, tensor

from cnn_engine import Engine, InputError
from cnn_engine.graph.dims import Dim
from cnn_engine.graph.onnx import load
from cnn_engine.graph.specialization import Specializations

node = helper.make_node
rng = np.random.default_rng(0)


def weight(*shape: int) -> np.ndarray:
    return (rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def recogniser() -> onnx.ModelProto:
    """Text in images of one height: strided convolutions, then a row of features for each place."""
    nodes = [
        node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", ["a"], ["b"]),
        node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2], strides=[2, 1], ceil_mode=1),
        node("Conv", ["c", "w2"], ["d"], pads=[0, 1, 0, 1], strides=[1, 2]),
        node("AveragePool", ["d"], ["e"], kernel_shape=[2, 1], strides=[2, 1]),
        node("Squeeze", ["e", "two"], ["f"]),
        node("Transpose", ["f"], ["g"], perm=[0, 2, 1]),
        node("Shape", ["g"], ["shape"]),
        node("Gather", ["shape", "one"], ["steps"], axis=0),
        node("Reshape", ["g", "rows"], ["h"]),
        node("MatMul", ["h", "w3"], ["i"]),
        node("Concat", ["minus", "steps", "five"], ["to"], axis=0),
        node("Reshape", ["i", "to"], ["j"]),
        node("Softmax", ["j"], ["y"], axis=2),
    ]
    constants = {
        "w1": weight(8, 3, 3, 3), "w2": weight(12, 8, 3, 3), "w3": weight(12, 5), "two": np.array([2]),
        "one": np.array([1]), "rows": np.array([-1, 12]), "minus": np.array([-1]), "five": np.array([5]),
    }  # fmt: skip
    return model(nodes, [tensor("x", ["N", 3, "H", "W"])], [tensor("y", None)], constants, opset=17)


def detector() -> onnx.ModelProto:
    """Two scales: one is made as large as the other by its computed size, and by a scale."""
    nodes = [
        node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Conv", ["a", "w2"], ["b"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Shape", ["a"], ["shape"]),
        node("Slice", ["shape", "two", "four"], ["place"]),
        node("Concat", ["channels", "place"], ["sizes"], axis=0),
        node("Resize", ["b", "", "", "sizes"], ["c"], mode="linear"),
        node("Concat", ["a", "c"], ["d"], axis=1),
        node("Resize", ["d", "", "scales"], ["e"], mode="nearest",
             coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        node("Slice", ["e", "zero", "crop", "axes"], ["f"]),
        node("GlobalAveragePool", ["b"], ["m"]),
        node("Sigmoid", ["m"], ["gate"]),
        node("Conv", ["f", "w3"], ["g"], auto_pad="SAME_UPPER", strides=[2, 2]),
        node("Mul", ["g", "gate"], ["y"]),
    ]  # fmt: skip
    constants = {
        "w1": weight(6, 3, 3, 3), "w2": weight(6, 6, 3, 3), "w3": weight(6, 12, 3, 3),
        "two": np.array([2]), "four": np.array([4]), "channels": np.array([1, 6]),
        "scales": np.array([1, 1, 1.5, 2], np.float32), "zero": np.array([0, 1]),
        "crop": np.array([-1, 10**9]), "axes": np.array([2, 3]),
    }  # fmt: skip
    return model(nodes, [tensor("x", [1, 3, "H", "W"])], [tensor("y", None)], constants, opset=17)


def transformer() -> onnx.ModelProto:
    """Patches with a class token and positions that are counted, as exporters write them."""
    nodes = [
        node("Conv", ["x", "w1"], ["a"], strides=[4, 4]),
        node("Shape", ["a"], ["shape"]),
        node("Gather", ["shape", "zero"], ["n"], axis=0),
        node("Concat", ["n", "channels", "minus"], ["to"], axis=0),
        node("Reshape", ["a", "to"], ["b"]),
        node("Transpose", ["b"], ["c"], perm=[0, 2, 1]),
        node("Concat", ["n", "ones"], ["wide"], axis=0),
        node("Expand", ["token", "wide"], ["tokens"]),
        node("Concat", ["tokens", "c"], ["d"], axis=1),
        node("Shape", ["d"], ["all"]),
        node("Gather", ["all", "scalar"], ["count"], axis=0),
        node("Range", ["start", "count", "scalar"], ["positions"]),
        node("Cast", ["positions"], ["floats"], to=1),
        node("Unsqueeze", ["floats", "last"], ["column"]),
        node("Add", ["d", "column"], ["e"]),
        node("ConstantOfShape", ["all"], ["nothing"]),
        node("Add", ["e", "nothing"], ["f"]),
        node("LayerNormalization", ["f", "gain"], ["g"], axis=-1),
        node("Transpose", ["g"], ["gt"], perm=[0, 2, 1]),
        node("MatMul", ["g", "gt"], ["scores"]),
        node("Softmax", ["scores"], ["attention"], axis=-1),
        node("MatMul", ["attention", "g"], ["y"]),
    ]
    constants = {
        "w1": weight(8, 3, 4, 4), "zero": np.array([0]), "channels": np.array([8]),
        "minus": np.array([-1]), "ones": np.array([1, 8]), "token": weight(1, 1, 8),
        "scalar": np.array(1), "start": np.array(0), "last": np.array([1]),
        "gain": np.ones(8, np.float32),
    }  # fmt: skip
    return model(nodes, [tensor("x", ["N", 3, "H", "W"])], [tensor("y", None)], constants, opset=17)


NETWORKS = {
    "recogniser": (recogniser(), st.tuples(st.integers(1, 4), st.just(16), st.integers(3, 90))),
    "detector": (detector(), st.tuples(st.just(1), st.integers(5, 40), st.integers(5, 40))),
    "transformer": (
        transformer(),
        st.tuples(st.integers(1, 3), st.integers(4, 30), st.integers(4, 30)),
    ),
}
ENGINES = {name: Engine(proto, device="cpu", threads=1) for name, (proto, _) in NETWORKS.items()}


@pytest.mark.parametrize("name", NETWORKS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_size_has_the_bits_of_an_engine_of_that_size(name, data):
    proto, shapes = NETWORKS[name]
    batch, height, width = data.draw(shapes)
    x = np.random.default_rng(width).normal(size=(batch, 3, height, width)).astype(np.float32)
    with Engine(proto, device="cpu", threads=1, input_shape={"x": x.shape}) as fixed:
        wanted = fixed.run({"x": x})["y"]
    found = ENGINES[name].run({"x": x})["y"]
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found.view("u4"), wanted.view("u4"))
    (symbolic,) = ENGINES[name].outputs
    numbers = {"N": batch, "H": height, "W": width}
    assert tuple(d.at(numbers) if isinstance(d, Dim) else d for d in symbolic.shape) == found.shape


@pytest.mark.parametrize("name", NETWORKS)
def test_few_graphs_stand_for_all_sizes(name, monkeypatch):
    """A new size of a kind that was met before reads no file and runs no pass."""
    engine = Engine(NETWORKS[name][0], device="cpu", threads=1)
    heights = (16,) if name == "recogniser" else range(16, 22)
    sizes = [(1, 3, height, width) for height in heights for width in range(16, 40)]
    for shape in sizes[: len(sizes) // 2]:
        engine.run({"x": np.zeros(shape, np.float32)})
    monkeypatch.setattr(Specializations, "_make", None, raising=False)
    monkeypatch.setattr(Specializations, "_made_symbolic", None)
    for shape in sizes[len(sizes) // 2 :]:
        engine.run({"x": np.zeros(shape, np.float32)})


def test_predict_takes_images_of_any_size():
    with Engine(recogniser(), device="cpu", threads=1) as engine:
        for count, width in ((3, 40), (1, 17), (5, 40)):
            images = rng.normal(size=(count, 3, 16, width)).astype(np.float32)
            whole = engine.run({"x": images})["y"]
            np.testing.assert_array_equal(engine.predict(images), whole)
            np.testing.assert_array_equal(engine.predict(images, batch=2), whole)


def test_an_engine_of_open_sizes_is_pickled_with_its_graphs_of_all_sizes():
    images = [np.ones((n, 3, 16, w), np.float32) for n, w in ((1, 40), (2, 57))]
    engine = Engine(recogniser(), device="cpu")
    wanted = [engine.predict(one) for one in images]
    assert engine.network._specializations.variants
    again = pickle.loads(pickle.dumps(engine))
    assert again.network._specializations.variants
    for one, found in zip(images, wanted, strict=True):
        assert again.predict(one).tobytes() == found.tobytes()


def test_a_size_that_the_file_cannot_have_is_refused_by_its_node():
    with Engine(recogniser(), device="cpu", threads=1) as engine:
        assert engine.inputs[0].shape[2] == Dim.symbol("H")
        with pytest.raises(InputError, match=r"Squeeze\): axes: expected dimensions of 1"):
            engine.run({"x": np.zeros((1, 3, 40, 40), np.float32)})
        with pytest.raises(InputError, match=r"inputs: x: expected shape \[1, 3, H, W\]"):
            engine.run({"x": np.zeros((1, 4, 16, 40), np.float32)})
        engine.run({"x": np.zeros((1, 3, 16, 40), np.float32)})


def test_inputs_of_one_symbol_agree():
    nodes = [node("MatMul", ["a", "b"], ["c"]), node("Relu", ["c"], ["y"])]
    shapes = {"a": ["M", "K"], "b": ["K", 5]}
    inputs = [tensor(name, dims) for name, dims in shapes.items()]
    with Engine(model(nodes, inputs, [tensor("y", None)]), device="cpu") as engine:
        for m, k in ((2, 3), (4, 7)):
            a, b = rng.normal(size=(m, k)), rng.normal(size=(k, 5))
            given = {"a": a.astype(np.float32), "b": b.astype(np.float32)}
            np.testing.assert_allclose(engine.run(given)["y"], np.maximum(a @ b, 0), rtol=1e-4)
        with pytest.raises(InputError, match=r"inputs: b: expected shape \[7, 5\], found \[6, 5\]"):
            engine.run({"a": given["a"], "b": np.zeros((6, 5), np.float32)})


def test_names_that_say_nothing_are_no_symbols():
    proto = model(
        [node("Relu", ["x"], ["y"])], [tensor("x", ["?", 3, "?", "?"])], [tensor("y", None)]
    )
    assert str(load(proto).open_inputs[0].shape) == "(batch, 3, height, width)"


def test_weights_are_packed_once_and_plans_share_memory():
    with Engine(recogniser(), device="cpu", threads=1) as engine:
        shapes = [(1, 3, 16, width) for width in range(20, 300, 7)]
        x = {shape: rng.normal(size=shape).astype(np.float32) for shape in shapes}
        for shape in shapes[::-1]:
            engine.run({"x": x[shape]})
        program, pool = engine._plans.open(), engine._plans.pool
        packed, (arena,) = len(program._prepared), pool._arenas
        (largest,) = {p.nbytes["cpu"] for s in pool._shelves.values() for p in s.idle[:1]
                      if dict(p.outputs)["y"].shape[1] == max_steps(shapes)}  # fmt: skip
        assert arena.capacity <= 1.2 * largest + 4096
        for shape in shapes:
            wanted = np.array(engine.run({"x": x[shape]})["y"])
            engine.run({"x": x[shapes[0]]})
            np.testing.assert_array_equal(engine.run({"x": x[shape]})["y"], wanted)
        assert len(program._prepared) == packed
        assert pool._arenas == [arena]


def max_steps(shapes) -> int:
    graph = load(recogniser())
    sizes = [graph.sizes_of({"x": shape}) for shape in shapes]
    return max(graph.with_sizes(size).values["y"].shape[1] for size in sizes)


def test_passes_at_once_have_memory_of_their_own():
    with Engine(recogniser(), device="cpu", threads=1) as engine:
        shapes = [(1, 3, 16, width) for width in (40, 90, 160, 77)]
        x = {shape: rng.normal(size=shape).astype(np.float32) for shape in shapes}
        wanted = {shape: engine.run({"x": x[shape]})["y"] for shape in shapes}

        def call(index: int) -> None:
            for turn in range(60):
                shape = shapes[(index + turn) % len(shapes)]
                np.testing.assert_array_equal(engine.run({"x": x[shape]})["y"], wanted[shape])

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(call, range(4)))
        assert len(engine._plans.pool._arenas) <= 4


def test_one_fused_network_is_for_every_batch():
    """Its rows come of a reshape to a computed batch."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("Shape", ["r"], ["shape"]),
        node("Gather", ["shape", "zero"], ["n"], axis=0),
        node("Concat", ["n", "minus"], ["to"], axis=0),
        node("Reshape", ["r", "to"], ["f"]),
        node("Gemm", ["f", "w2"], ["y"], transB=1),
    ]
    constants = {
        "w": weight(4, 3, 3, 3), "w2": weight(5, 144), "zero": np.array([0]), "minus": np.array([-1]),
    }  # fmt: skip
    proto = model(nodes, [tensor("x", ["N", 3, 6, 6])], [tensor("y", None)], constants, opset=17)
    with (
        Engine(proto, device="cpu", variant="fused", threads=1) as fused,
        Engine(proto, device="cpu", variant="if", threads=1) as plain,
    ):
        for batch in (1, 3, 8):
            x = rng.normal(size=(batch, 3, 6, 6)).astype(np.float32)
            wanted = plain.run({"x": x})["y"]
            np.testing.assert_allclose(fused.run({"x": x})["y"], wanted, rtol=1e-4, atol=1e-5)
        assert len(fused._plans.open()._prepared) == 1


def test_weights_of_few_positions_are_not_those_of_many():
    """Winograd's weights are packed with fewer numbers where an image has few tiles."""
    nodes = [
        node("Conv", ["x", "first"], ["a"], strides=[32, 32]),
        node("Conv", ["a", "w"], ["b"], pads=[1, 1, 1, 1]),
        node("Relu", ["b"], ["c"]),
        node("Add", ["b", "c"], ["y"]),  # no chain of layers, which one kernel would run
    ]
    constants = {"first": weight(96, 1, 1, 1), "w": weight(24, 96, 3, 3)}
    proto = model(nodes, [tensor("x", [1, 1, "H", "W"])], [tensor("y", None)], constants, opset=17)
    with Engine(proto, device="cpu", threads=1) as engine:  # packed for 7 x 7 at first
        for size in (736, 224, 1472, 400):
            x = rng.normal(size=(1, 1, size, size)).astype(np.float32)
            with Engine(proto, device="cpu", threads=1, input_shape={"x": x.shape}) as fixed:
                wanted = fixed.run({"x": x})["y"]
            np.testing.assert_array_equal(engine.run({"x": x})["y"], wanted)
