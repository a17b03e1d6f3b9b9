"""ONNX files as converters and exporters write them, which the checker would not always let pass."""

from __future__ import annotations

import importlib

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx_models import model, tensor

from cnn_engine import Engine
from cnn_engine.errors import InputError
from cnn_engine.graph.onnx import UnsupportedNodesError, load
from cnn_engine.graph.probabilities import gives_probabilities
from cnn_engine.graph.reference import reference

node = helper.make_node
rng = np.random.default_rng(0)


def run(proto: onnx.ModelProto, inputs, **options) -> dict[str, np.ndarray]:
    return Engine(proto, device="cpu", threads=1, **options).run(inputs)


def theirs(proto: onnx.ModelProto, inputs) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


def same(proto: onnx.ModelProto, inputs) -> None:
    found, wanted = run(proto, inputs), theirs(proto, inputs)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


X = rng.standard_normal((2, 3)).astype(np.float32)


# -- order, dimensions, outputs ------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_nodes_in_any_order(order):
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Neg", ["x"], ["b"]),
        node("Add", ["a", "b"], ["c"]),
        node("Mul", ["c", "a"], ["y"]),
    ]
    proto = model([nodes[i] for i in order], [tensor("x", [2, 3])], [tensor("y", None)])
    found = run(proto, {"x": X})["y"]
    np.testing.assert_array_equal(found, (np.maximum(X, 0) - X) * np.maximum(X, 0))


def test_a_circle_of_nodes_is_named():
    nodes = [node("Add", ["x", "b"], ["a"], name="first"), node("Relu", ["a"], ["b"])]
    with pytest.raises(InputError, match=r"node first \(Add\): input 'b': .*circle"):
        load(model(nodes, [tensor("x", [1])], [tensor("a", None)]))


def test_a_dimension_of_minus_one_is_open():
    proto = model([node("Relu", ["x"], ["y"])], [tensor("x", [1, 3])], [tensor("y", None)])
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert load(proto).batched == ("x",)
    same(proto, {"x": X})


def test_a_tensor_that_is_two_outputs():
    proto = model([node("Relu", ["x"], ["y"])], [tensor("x", [2, 3])], [tensor("y", [2, 3])])
    proto.graph.output.append(proto.graph.output[0])
    same_array = run(proto, {"x": X})
    assert list(same_array) == ["y"]
    np.testing.assert_array_equal(same_array["y"], np.maximum(X, 0))


def test_inputs_and_initializers_that_are_outputs():
    outputs = [tensor("x", [2, 3]), tensor("w", [3]), tensor("y", [2, 3])]
    constants = {"w": np.arange(3, dtype=np.float32)}
    same(
        model([node("Add", ["x", "w"], ["y"])], [tensor("x", [2, 3])], outputs, constants), {"x": X}
    )


# -- branches ------------------------------------------------------------------------------------


def branch(nodes, outputs, initializers=()) -> onnx.GraphProto:
    made = [tensor(name, None) for name in outputs]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in initializers]
    return helper.make_graph(nodes, "branch", [], made, constants)


def by_shape(*nodes, rows: int, then_branch, else_branch, outputs=("y",)) -> onnx.ModelProto:
    """A model with an If that asks whether x has three columns; ``rows`` are those of x."""
    constants = {"one": np.array(1, np.int64), "three": np.array(3, np.int64)}
    condition = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "one"], ["columns"]),
        node("Equal", ["columns", "three"], ["is_three"]),
        node("If", ["is_three"], list(outputs), then_branch=then_branch, else_branch=else_branch),
    ]
    made = [tensor(name, None) for name in outputs]
    return model([*nodes, *condition], [tensor("x", [rows, 3])], made, constants)


def test_a_branch_chosen_by_shapes_has_names_of_its_own():
    """Both branches and the graph around them use the names ``t`` and ``k``."""
    then_branch = branch(
        [node("Add", ["x", "k"], ["t"]), node("Neg", ["t"], ["r"])], ["r"], [("k", np.float32(2))]
    )
    else_branch = branch([node("Relu", ["x"], ["t"])], ["t"])
    around = [node("Abs", ["x"], ["t"]), node("Relu", ["t"], ["k"])]
    proto = by_shape(*around, rows=2, then_branch=then_branch, else_branch=else_branch)
    np.testing.assert_array_equal(run(proto, {"x": X})["y"], -(X + 2))


def test_outputs_of_a_branch_that_it_does_not_make():
    """A tensor from around the branch, a constant of its own, and one tensor twice."""
    then_branch = branch(
        [node("Neg", ["x"], ["n"])], ["x", "k", "n", "n"], [("k", np.arange(2, dtype=np.float32))]
    )
    outputs = ("a", "b", "c", "d")
    proto = by_shape(rows=2, then_branch=then_branch, else_branch=then_branch, outputs=outputs)
    found = run(proto, {"x": X})
    for name, wanted in zip(outputs, (X, np.arange(2), -X, -X), strict=True):
        np.testing.assert_array_equal(found[name], wanted)


def test_a_branch_within_a_branch_reads_from_around_both():
    inner = node(
        "If", ["is_three"], ["r"],
        then_branch=branch([node("Sub", ["m", "x"], ["q"])], ["q"]),
        else_branch=branch([node("Relu", ["x"], ["q"])], ["q"]),
    )  # fmt: skip
    then_branch = branch([inner, node("Neg", ["x"], ["m"])], ["r"])  # out of order, too
    proto = by_shape(rows=2, then_branch=then_branch, else_branch=branch([], ["x"]))
    np.testing.assert_array_equal(run(proto, {"x": X})["y"], -X - X)


def test_a_condition_may_be_given_as_a_constant():
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    one = branch([node("Relu", ["x"], ["r"])], ["r"])
    other = branch([node("Neg", ["x"], ["r"])], ["r"])
    proto = model(
        [node("If", ["flag"], ["y"], name="choose", then_branch=one, else_branch=other)],
        [tensor("x", [2, 3]), flag], [tensor("y", None)],
    )  # fmt: skip
    for value in (True, False):
        graph = load(proto, constants={"flag": np.array(value)})
        found = Engine(graph, device="cpu").run({"x": X})["y"]
        np.testing.assert_array_equal(found, np.maximum(X, 0) if value else -X)


# -- open shapes -----------------------------------------------------------------------------------


def conv1d(dims=("batch", 5, "time")) -> onnx.ModelProto:
    nodes = [node("Conv", ["x", "w"], ["y"], kernel_shape=[3])]
    w = rng.standard_normal((4, 5, 3)).astype(np.float32)
    return model(nodes, [tensor("x", dims)], [tensor("y", None)], {"w": w})


def test_the_shape_that_is_suggested_would_do():
    """No size of T fits both a row of 3 and one of 5; with a shape, the error names the node."""
    row = {"three": np.ones(3, np.float32), "five": np.ones(5, np.float32)}
    nodes = [node("Add", ["x", "three"], ["c"]), node("Add", ["c", "five"], ["y"])]
    proto = model(nodes, [tensor("x", ["N", "T"])], [tensor("y", None)], row)
    with pytest.raises(
        InputError, match=r"'x' \[N, T\].*--input-shape x=1,16 \(input_shape=.*1, 16"
    ):
        load(proto)
    with pytest.raises(InputError, match="expected shapes that broadcast"):
        load(proto, input_shape={"x": (1, 3)})


def test_inputs_of_any_rank_ask_for_a_shape():
    nodes = [node("Add", ["a", "b"], ["c"]), node("Add", ["c", "z"], ["y"])]
    inputs = [tensor("a", ["N", "T"]), tensor("b", ["N", "T"]), tensor("z", None)]
    with pytest.raises(
        InputError, match=r"found 'z' any: give shapes, such as --input-shape z=1,3"
    ):
        load(model(nodes, inputs, [tensor("y", None)]))


def test_operators_that_are_lacking_are_named_before_shapes_are_asked_for():
    proto = conv1d()
    proto.graph.node.append(node("ImageDecoder", ["y"], ["boxes"], name="nms"))
    proto.graph.node.append(node("Gelu", ["y"], ["z"]))  # known by ONNX's own definition
    proto.graph.node.append(node("GroupQueryAttention", ["boxes"], ["q"], domain="com.microsoft"))
    with pytest.raises(UnsupportedNodesError) as raised:
        load(proto)
    assert [n.operator for n in raised.value.nodes] == ["ImageDecoder", "GroupQueryAttention"]


def test_the_batch_stays_open_beside_an_input_shape():
    proto = conv1d()
    for shape in ((2, 5, 16), (None, 5, 16)):
        graph = load(proto, input_shape={"x": shape})
        assert graph.inputs[0].shape == (shape[0] or 1, 5, 16)
        assert graph.batched == ("x",)
    assert load(proto, batch=8, input_shape={"x": (2, 5, 16)}).inputs[0].shape == (8, 5, 16)
    engine = Engine(proto, device="cpu", input_shape={"x": (1, 5, 16)})
    x = rng.standard_normal((7, 5, 16)).astype(np.float32)
    every = engine.run({"x": x})["y"]
    for index in range(7):
        one = engine.run({"x": x[index : index + 1]})["y"]
        np.testing.assert_allclose(every[index], one[0], rtol=1e-5, atol=1e-6)


def test_inputs_given_other_sizes_for_the_batch_have_none():
    nodes = [node("Relu", ["a"], ["y"]), node("Relu", ["b"], ["z"])]
    outputs = [tensor("y", None), tensor("z", None)]
    proto = model(nodes, [tensor("a", [None, 2]), tensor("b", [None, 2])], outputs)
    graph = load(proto, input_shape={"a": (3, 2), "b": (4, 2)})
    assert [value.shape for value in graph.inputs] == [(3, 2), (4, 2)]
    assert graph.batched == ()


@pytest.mark.parametrize("shape", [(1, 4, 16), (1, 5), (1, 5, -2)])
def test_a_shape_that_does_not_fit_the_file(shape):
    with pytest.raises(
        InputError, match=r"input 'x': input_shape: expected a shape for \[batch, 5"
    ):
        load(conv1d(), input_shape={"x": shape})


@pytest.mark.parametrize("command", ["run", "inspect"])
def test_batch_and_input_shape_agree_on_the_command_line(command, tmp_path, capsys):
    proto = model(
        [
            node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3]),
            node("GlobalAveragePool", ["c"], ["p"]),
            node("Flatten", ["p"], ["y"]),
        ],
        [tensor("x", ["batch", 3, "h", "w"])], [tensor("y", None)],
        {"w": rng.standard_normal((4, 3, 3, 3)).astype(np.float32)},
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    main = importlib.import_module(f"cnn_engine.{command}").main
    given = ["--batch", "8", "--input-shape", "x=1,3,16,12"]
    if command == "run":
        code = main(["--model", str(path), "--device", "cpu", "--iterations", "1", *given])
        wanted = "Batch                        : 8 images"
    else:
        code, wanted = main([str(path), *given]), "8 x 3 x 16 x 12"
    out = capsys.readouterr().out
    assert code == 0
    assert wanted in out


# -- inputs that are settings ------------------------------------------------------------------------


def reshaped() -> onnx.ModelProto:
    """y = x reshaped to ``shape``, and scaled by ``by``."""
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, [2])
    by = helper.make_tensor_value_info("by", TensorProto.FLOAT, [1])
    nodes = [node("Reshape", ["x", "shape"], ["r"]), node("Mul", ["r", "by"], ["y"])]
    return model(nodes, [tensor("x", [2, 3]), shape, by], [tensor("y", None)])


def test_settings_from_python_take_the_files_type_and_shape():
    found = run(reshaped(), {"x": X}, constants={"shape": [3, -1], "by": 2})
    np.testing.assert_array_equal(found["y"], X.reshape(3, 2) * 2)


def test_settings_from_the_command_line(tmp_path, capsys):
    from cnn_engine import inspect

    path = tmp_path / "m.onnx"
    onnx.save(reshaped(), path)
    assert inspect.main([str(path), "--constant", "shape=3,2", "--constant", "by=0.5"]) == 0
    assert "3 x 2" in capsys.readouterr().out
    assert inspect.main([str(path)]) == 0  # of an example
    capsys.readouterr()
    for option, message in (
        ("shape=3,2.5", "expected int64"),
        ("shape=3,2,1", "expected shape [2], found [3]"),
        ("shape=[[3,2]]", "expected shape [2], found [1, 2]"),
        ("by=true2", "expected NAME=VALUE"),
        ("by", "expected NAME=VALUE"),
        ("by=text", "expected NAME=VALUE"),
        ('by="text"', "expected float32"),
        ("by={}", "expected float32"),
        ("other=1", "expected inputs of the model (x, shape, by), found 'other'"),
    ):
        assert inspect.main([str(path), "--constant", option]) == 2
        captured = capsys.readouterr()
        assert message in captured.err, option
        assert captured.err.count("\n") == 1, option


# -- what outputs may be called ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "are"),
    [
        ([node("Softmax", ["x"], ["y"], axis=1)], True),
        ([node("Softmax", ["x"], ["y"], axis=0)], False),
        ([node("LogSoftmax", ["x"], ["y"])], False),
        ([node("Sigmoid", ["x"], ["y"])], False),
        ([node("Relu", ["x"], ["y"])], False),
        ([node("Softmax", ["x"], ["s"]), node("Flatten", ["s"], ["y"])], True),
        ([node("Softmax", ["x"], ["s"]), node("Neg", ["s"], ["y"])], False),
    ],
)
def test_probabilities_are_a_softmax_over_all_of_a_row(nodes, are):
    proto = model(nodes, [tensor("x", [2, 3])], [tensor("y", None)])
    assert gives_probabilities(load(proto)) is are


def test_a_softmax_over_part_of_a_row_gives_no_probabilities():
    proto = model(
        [node("Softmax", ["x"], ["s"], axis=2), node("Flatten", ["s"], ["y"])],
        [tensor("x", [2, 3, 4])], [tensor("y", None)],
    )  # fmt: skip
    assert not gives_probabilities(load(proto))


def test_engines_say_whether_they_give_probabilities():
    assert Engine("cifar10", device="cpu").gives_probabilities
    proto = model([node("Relu", ["x"], ["y"])], [tensor("x", [2, 3])], [tensor("y", None)])
    assert not Engine(proto, device="cpu").gives_probabilities


# -- float16 and bfloat16 -----------------------------------------------------------------------------

FLOAT16, BFLOAT16 = TensorProto.FLOAT16, TensorProto.BFLOAT16


def half_network(kind: int, casts: bool) -> onnx.ModelProto:
    """conv -> relu -> max pool -> mean in ``kind``; float32 outside of casts, or ``kind`` throughout."""
    w = rng.standard_normal((8, 4, 3, 3)).astype(np.float32) * 0.2
    weights = [
        helper.make_tensor("w", kind, w.shape, w.ravel()),
        helper.make_tensor("b", kind, [8], w[:, 0, 0, 0]),
    ]
    nodes = [
        node("Conv", ["a", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["d"]),
        node("MaxPool", ["d"], ["e"], kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", ["e"], ["f"]),
    ]
    outer = TensorProto.FLOAT if casts else kind
    if casts:
        nodes = [node("Cast", ["x"], ["a"], to=kind), *nodes, node("Cast", ["f"], ["y"], to=outer)]
    else:
        nodes = [node("Identity", ["x"], ["a"]), *nodes, node("Identity", ["f"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "half",
        [tensor("x", [2, 4, 12, 10], outer)],
        [tensor("y", [2, 8, 1, 1], outer)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("casts", [True, False])
def test_a_float16_network_runs_in_float32_kernels(casts):
    proto = half_network(FLOAT16, casts)
    x = rng.standard_normal((2, 4, 12, 10)).astype(np.float32 if casts else np.float16)
    engine = Engine(proto, device="cpu", threads=1)
    graph = load(proto)
    assert {graph.values[n.outputs[0]].dtype for n in graph.nodes if n.op.kind == "conv2d"} == {
        "float32"
    }
    found, wanted = engine.run({"x": x})["y"], theirs(proto, {"x": x})["y"]
    assert found.dtype == wanted.dtype == x.dtype
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), rtol=4e-3, atol=4e-3)
    if not casts:  # as near to what the file says as float16 allows
        (exact,) = reference(graph, {"x": x}).values()
        assert np.abs(found.astype(float) - exact).max() <= 2.0**-11 * np.abs(exact).max()


def test_a_bfloat16_network_takes_and_gives_float32():
    for casts in (True, False):
        proto = half_network(BFLOAT16, casts)
        x = rng.standard_normal((2, 4, 12, 10)).astype(np.float32)
        found = run(proto, {"x": x})["y"]
        assert found.dtype == np.float32
        (exact,) = reference(load(proto), {"x": x}).values()
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [FLOAT16, BFLOAT16])
def test_rounding_that_is_meant_is_kept(kind):
    """Float32 to fewer bits and back, with nothing between: the cast is there for its rounding."""
    nodes = [
        node("Cast", ["x"], ["h"], to=kind),
        node("Cast", ["h"], ["r"], to=TensorProto.FLOAT),
        node("Mul", ["r", "r"], ["y"]),
    ]
    proto = model(nodes, [tensor("x", [2, 3])], [tensor("y", [2, 3])])
    x = np.array([[1 + 2.0**-12, 1 + 3 * 2.0**-9, 1e6], [-1e-9, 0.1, 3.14159]], np.float32)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    with np.errstate(over="ignore"):
        rounded = x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(run(proto, {"x": x})["y"], rounded * rounded)


def test_outputs_in_float16_wherever_they_come_from():
    """A constant, the input itself, a value that other nodes read too, and one of no stated type."""
    nodes = [
        node("Add", ["x", "w"], ["s"]),
        node("Relu", ["s"], ["r"]),
        node("Cast", ["r"], ["wide"], to=TensorProto.FLOAT),
    ]
    outputs = [tensor(name, [2, 3], FLOAT16) for name in ("x", "s")]
    outputs += [tensor("w", [3], FLOAT16), tensor("wide", [2, 3])]
    outputs.append(helper.make_empty_tensor_value_info("r"))
    w = np.array([0.1, -3, 7], np.float16)
    x = X.astype(np.float16)
    proto = model(nodes, [tensor("x", [2, 3], FLOAT16)], outputs, {"w": w})
    found = run(proto, {"x": x})
    assert {name: array.dtype.name for name, array in found.items()} == {
        "x": "float16", "s": "float16", "w": "float16", "wide": "float32", "r": "float16"
    }  # fmt: skip
    exact = x.astype(np.float32) + w.astype(np.float32)
    np.testing.assert_array_equal(found["x"], x)
    np.testing.assert_array_equal(found["w"], w)
    np.testing.assert_array_equal(found["s"], exact.astype(np.float16))
    np.testing.assert_array_equal(found["r"], np.maximum(exact, 0).astype(np.float16))
    np.testing.assert_array_equal(found["wide"], np.maximum(exact, 0))
