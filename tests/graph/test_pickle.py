"""Engines, graphs and kernels in another process: what is pickled computes the same bits."""

from __future__ import annotations

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import fake_cuda
import numpy as np
import pytest
from lowered import fuse
from onnx import TensorProto, helper, numpy_helper

from cnn_engine import Engine, Kernel
from cnn_engine.graph import passes
from cnn_engine.graph.onnx import load


def model(arithmetic: bool = True) -> bytes:
    """A file for any batch in which a batch norm, constants and shapes are folded."""
    rng = np.random.default_rng(1)
    f = lambda *shape: rng.uniform(0.1, 1, shape).astype(np.float32)  # noqa: E731
    constants = {
        "w": f(8, 3, 3, 3), "s": f(8), "b": f(8), "mean": f(8), "var": f(8), "v": f(8, 8, 1, 1),
        "one": np.int64([1]), "zero": np.int64([0]), "rest": np.int64([-1]), "two": np.float32(2),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c", "s", "b", "mean", "var"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("Add", ["two", "two"], ["four"]),
        helper.make_node("Mul", ["r", "four"], ["m"]),
        helper.make_node("Conv", ["m", "v"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["q"]),
        helper.make_node("Relu", ["q"], ["p"]),
    ]
    if arithmetic:
        nodes += [
            helper.make_node("Shape", ["p"], ["shape"]),
            helper.make_node("Slice", ["shape", "zero", "one"], ["batch"]),
            helper.make_node("Concat", ["batch", "rest"], ["to"], axis=0),
            helper.make_node("Reshape", ["p", "to"], ["y"]),
        ]
    else:
        nodes.append(helper.make_node("Flatten", ["p"], ["y"]))
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 9, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 8])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made.SerializeToString()


def numpy_relu(x, y, shape) -> None:
    np.maximum(x, 0, out=y)


def images(count: int) -> np.ndarray:
    return np.random.default_rng(2).uniform(-1, 1, (count, 3, 9, 8)).astype(np.float32)


@pytest.mark.parametrize("arithmetic", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"variant": "blocked"}, {"tune": True}, {"device": "cuda"}]
)
def test_an_engine_of_a_model(monkeypatch, tmp_path, options, arithmetic):
    monkeypatch.setenv("CNN_ENGINE_KERNEL_CACHE", str(tmp_path))
    fake_cuda.install(monkeypatch, tensor_cores=True)
    with Engine(model(arithmetic), threads=1, **{"device": "cpu", **options}) as engine:
        for count in (1, 3):  # the second of them makes the graph for another batch
            with pickle.loads(pickle.dumps(engine)) as again:
                for batch in (2, 1, 5):
                    wanted, found = (e.predict(images(batch)) for e in (engine, again))
                    np.testing.assert_array_equal(found, wanted)
            engine.predict(images(count))


def test_an_engine_in_a_spawned_process():
    context = multiprocessing.get_context("spawn")
    with (
        Engine(model(), device="cpu", threads=1) as engine,
        ProcessPoolExecutor(1, mp_context=context) as executor,
    ):
        for count in (2, 1):
            found = executor.submit(engine.predict, images(count)).result()
            np.testing.assert_array_equal(found, engine.predict(images(count)))


def test_graphs_and_their_rewrites():
    graph = load(model())
    for made in (graph, passes.simplify(graph), fuse(passes.simplify(graph))):
        again = pickle.loads(pickle.dumps(made))
        for batch in (1, 4):
            wanted, found = made.with_batch(batch), again.with_batch(batch)
            assert found.nodes == wanted.nodes
            assert (found.inputs, found.outputs) == (wanted.inputs, wanted.outputs)
            for name, array in wanted.constants.items():
                np.testing.assert_array_equal(found.constants[name], array)


def test_weights_that_are_shared_stay_so():
    with Engine(model(), device="cpu", threads=1) as engine:
        once = len(pickle.dumps(engine))
        engine.predict(images(2))
        assert len(pickle.dumps(engine)) < 1.1 * once
        with pickle.loads(pickle.dumps(engine)) as again:
            base = again.network.base
            other = base.with_batch(4)
            kept = [name for name in base.constants if name in other.constants]
            assert kept
            assert all(other.constants[name] is base.constants[name] for name in kept)


@pytest.mark.parametrize("form", ["callable", "file", "path"])
def test_an_engine_with_a_kernel_of_a_users_own(tmp_path, form):
    if form == "callable":
        kernel = Kernel.from_callable(numpy_relu, "relu", "cpu")
    else:
        from test_kernel_files import written

        path = written(tmp_path, "relu", "cpu")
        kernel = Kernel.from_file(path) if form == "file" else str(path)
    with (
        Engine(model(), device="cpu", threads=1, kernels=[kernel]) as engine,
        pickle.loads(pickle.dumps(engine)) as again,
    ):
        np.testing.assert_array_equal(again.predict(images(2)), engine.predict(images(2)))
        assert [k.name for k in again.kernels.values()] == [k.name for k in engine.kernels.values()]
