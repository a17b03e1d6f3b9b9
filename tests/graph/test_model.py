"""Engines of graphs that are no chain of layers: built by hand, or read from ONNX models."""

from __future__ import annotations

import functools
import pickle
from dataclasses import replace

import fake_cuda
import graphs
import numpy as np
import pytest
import tolerances

from cnn_engine import Engine, InputError, UnsupportedError, _cpu
from cnn_engine.devices import cpu
from cnn_engine.graph import reference
from cnn_engine.graph.dims import Sizes
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.kernels import select
from cnn_engine.operators.binary import Add
from cnn_engine.operators.cast import Cast
from cnn_engine.operators.mathematics import Neg
from cnn_engine.operators.shaping import Reshape
from cnn_engine.operators.unary import Relu
from cnn_engine.report import html, text

#: A device, and the data modes that it has; the GPU's kernels are played by the CPU's.
POSITIONS = [
    ("cpu", "resident"), ("cuda", "resident"), ("cuda", "transfer"), ("cuda", "managed"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    fake_cuda.install(monkeypatch)


def check(engine: Engine, images: np.ndarray) -> None:
    """Asserts that predict and run give what the reference does."""
    graph = engine.network.graph(len(images))
    (wanted,) = reference.reference(graph, {"images": images}).values()
    bound = tolerances.PROBABILITY * np.abs(wanted).max()
    tolerances.assert_close(engine.predict(images), wanted, bound)
    (found,) = engine.run({"images": images}).values()
    tolerances.assert_close(found, wanted, bound)


@pytest.mark.parametrize("place", POSITIONS, ids=" ".join)
@pytest.mark.parametrize(
    "variant", ["auto", *(v for v, row in select.VARIANTS.items() if row.layered)]
)
@pytest.mark.parametrize("reduction", [None, False, True])
def test_a_residual_network(rng, place, variant, reduction):
    graph = graphs.resnet((1, 2), (1, 3, 16, 16), width=4)
    device, mode = place
    options = {"device": device, "data_mode": mode, "variant": variant, "reduction": reduction}
    try:
        engine = Engine(graph, threads=1, **options)
    except UnsupportedError as error:
        row = select.VARIANTS[variant]
        assert device not in row.devices or (reduction and not row.reduction), error
        return
    with engine as e:
        for batch in (1, 3):
            check(e, rng.standard_normal((batch, 3, 16, 16)).astype(np.float32))
        kernels = {
            s.name: s.kernel for s in e.plan(1, np.dtype(np.float32)).steps if s.kind == "conv"
        }
        if variant != "auto":
            assert set(kernels.values()) == {variant}
        elif device == "cpu" and not reduction:
            assert set(kernels.values()) <= {"channels_last", "winograd"}


@pytest.mark.parametrize("place", POSITIONS, ids=" ".join)
def test_random_graphs_on_every_place(place):
    device, mode = place
    for seed in range(30):
        graph = graphs.random_graph(seed, 12)
        images = np.random.default_rng(seed).integers(-3, 4, (1, 2, 3, 4)).astype(np.float32)
        wanted = reference.reference(graph, {"images": images})
        with Engine(graph, device=device, data_mode=mode, threads=1) as e:
            for name, array in e.run({"images": images}).items():
                np.testing.assert_array_equal(array, wanted[name], err_msg=f"{seed} {name}")


def small(outputs: tuple[str, ...]) -> Graph:
    """Two inputs, one of integers; outputs that are an input, another's shape, and used further on."""
    nodes = (
        Node("cast", Cast("float32"), ("numbers",), ("floats",)),
        Node("add", Add(), ("images", "floats"), ("sum",)),
        Node("flat", Reshape((-1,)), ("sum",), ("line",)),
        Node("relu", Relu(), ("sum",), ("positive",)),
        Node("of input", Reshape((6, 1)), ("images",), ("column",)),
        Node("neg", Neg(), ("numbers",), ("negative",)),
    )
    inputs = (Value("images", (2, 3)), Value("numbers", (2, 3), "int64"))
    return Graph("small", inputs, outputs, nodes, {"unused": np.float32(3)})


@pytest.mark.parametrize("place", POSITIONS, ids=" ".join)
@pytest.mark.parametrize(
    "outputs",
    [
        ("positive",), ("line", "positive"), ("sum", "line", "positive"), ("images", "column", "sum"),
        ("negative", "line"), ("unused", "numbers", "negative"), ("column", "line", "sum", "floats"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_several_inputs_and_outputs(place, outputs):
    device, mode = place
    graph = small(outputs)
    inputs = {
        "images": np.arange(6, dtype=np.float32).reshape(2, 3) - 3,
        "numbers": np.array([[1, 2, 3], [-9, 8, 7]]),
    }
    wanted = reference.reference(graph, inputs)
    with Engine(graph, device=device, data_mode=mode, threads=1) as e:
        for _ in range(2):
            found = e.run(inputs)
            assert list(found) == list(outputs)
            for name, array in found.items():
                np.testing.assert_array_equal(array, wanted[name], err_msg=name)
                assert array.dtype == graph.values[name].dtype


def test_constants_that_differ_from_batch_to_batch_outlive_the_plans_of_others(rng):
    """A file's shape arithmetic may fold the batch into a constant, of the same name for every batch."""

    def made(sizes: Sizes) -> Graph:
        batch = sizes.images
        b = graphs.Builder((batch, 3, 4, 4))
        b.constants["bias"] = np.full((3, 4, 4), batch, np.float32)
        b.add(Add(), b.relu("images"), "bias")
        return replace(b.graph(), rebuild=made)

    with Engine(made(Sizes.of({"batch": 1}, "batch")), device="cpu", threads=1) as e:
        for batch in (1, 2, 3, 1, 2):
            images = rng.standard_normal((batch, 3, 4, 4)).astype(np.float32)
            (found,) = e.run({"images": images}).values()
            np.testing.assert_array_equal(found, np.maximum(images, 0) + batch)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "inputs: expected images, numbers, found none"),
        (np.zeros((2, 3), np.float32), "inputs: expected a mapping from names to arrays, found ndarray"),
        (None, "inputs: expected a mapping from names to arrays, found NoneType"),
        ({"images": np.zeros((2, 3), np.float32)}, "expected images, numbers, found images"),
        ({"images": np.zeros((3, 2), np.float32), "numbers": np.zeros((2, 3), np.int64)},
         r"inputs: images: expected shape \[2, 3\], found \[3, 2\]"),
        ({"images": np.zeros((2, 3), np.complex64), "numbers": np.zeros((2, 3), np.int64)},
         "inputs: images: expected float32, found complex64"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit(inputs, message):
    with Engine(small(("line",)), device="cpu") as e, pytest.raises(InputError, match=message):
        e.run(inputs)


def test_a_graph_of_several_inputs_says_so_in_predict():
    with (
        Engine(small(("line",)), device="cpu") as e,
        pytest.raises(UnsupportedError, match="expected a network with one input, found 2"),
    ):
        e.predict(np.zeros((1, 3, 8, 8), np.float32))


def test_a_model_for_one_batch_alone_takes_images_in_such_parts(rng):
    b = graphs.Builder((2, 3, 8, 8), batched=False)
    b.head(b.relu(b.conv("images", 4)), 5)
    images = rng.standard_normal((6, 3, 8, 8)).astype(np.float32)
    with Engine(b.graph(), device="cpu") as e:
        found = e.predict(images)
        for first in (0, 2, 4):
            part = images[first : first + 2]
            np.testing.assert_array_equal(found[first : first + 2], e.predict(part))
        with pytest.raises(
            InputError, match="batch: expected 2, for which alone the model is made"
        ):
            e.predict(images[:3])


def test_pixels_need_a_place_in_the_model():
    with (
        Engine(graphs.resnet((1,), (1, 3, 16, 16), width=4), device="cpu") as e,
        pytest.raises(InputError, match="images: expected float32 .*, found uint8"),
    ):
        e.predict(np.zeros((1, 3, 16, 16), np.uint8))


def test_a_network_runs_by_names_as_well(rng):
    images = rng.integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    with Engine("cifar10", device="cpu") as e:
        found = e.run({"images": images})
        np.testing.assert_array_equal(found["probabilities"], e.predict(images))


def test_an_onnx_model_by_path_bytes_and_proto(tmp_path, rng):
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    weight = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["g"]),
            helper.make_node("Flatten", ["g"], ["y"]),
        ],
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 4])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    images = rng.standard_normal((2, 3, 8, 8)).astype(np.float32)
    wanted = np.maximum(reference.conv2d(images, weight, padding=1), 0).mean((2, 3))
    for source in (path, str(path), path.read_bytes(), model):
        with Engine(source, device="cpu", threads=1) as e:
            tolerances.assert_close(e.predict(images), wanted, tolerances.PROBABILITY)
            with pickle.loads(pickle.dumps(e)) as again:
                np.testing.assert_array_equal(again.predict(images), e.predict(images))
    with pytest.raises(InputError, match="weights: expected default"):
        Engine(path, device="cpu", weights="random")


@pytest.mark.parametrize("pays", [False, True])
@pytest.mark.skipif(bool(_cpu.bfloat16_why_not()), reason=_cpu.bfloat16_why_not())
def test_convolutions_in_bfloat16(rng, monkeypatch, pays):
    """Direct ones multiply in it where that pays, the others stay float32; the check allows for just that
    rounding.
    """
    monkeypatch.setattr(_cpu, "bfloat16_pays", lambda: pays)
    monkeypatch.setattr(cpu, "_target", functools.cache(cpu._target.__wrapped__))
    graph = graphs.resnet((1, 1), (1, 3, 32, 32))
    images = rng.standard_normal((3, 3, 32, 32)).astype(np.float32)
    wide = Engine(graph, device="cpu", dtype="float32")
    with Engine(graph, device="cpu", dtype="bfloat16") as engine:
        steps = engine.plan(3, images.dtype).steps
        assert ("bfloat16" in {step.kernel for step in steps}) == pays
        found = engine.check(images)
        assert found.passed
        assert not pays or found.max_abs_diff > wide.check(images).tolerance
    with pytest.raises(UnsupportedError, match="bfloat16"):
        Engine(graph, device="cpu", dtype="bfloat16", variant="if")


def test_repr_names_what_a_report_does():
    """Where ``auto`` chooses for each node: not the variant that plain convolutions would have."""
    with Engine(graphs.resnet((1, 1), (1, 3, 32, 32)), device="cpu", threads=1) as engine:
        images = np.zeros((1, 3, 32, 32), np.float32)
        result = engine.profile(images, iterations=1, warmup=0, check=False)
        kernels = {layer.kernel for layer in result.layers if layer.kind in ("conv", "fc")}
        said = repr(engine)
        assert "winograd" in kernels
        named = said.partition(": auto: ")[2].partition(", float32")[0]
        assert set(named.split(", ")) == kernels
        page, lines = html.render([result]), text.render(result)
        for layer in result.layers:
            assert f">{layer.kernel}<" in page
            assert text.where(layer) in lines
    assert repr(engine) == said[:-1] + ", closed>"
    with Engine(
        graphs.resnet((1,), (1, 3, 8, 8)), device="cpu", threads=1, variant="blocked"
    ) as engine:
        assert "on cpu: blocked, float32" in repr(engine)
