"""ONNX files as converters and exporters write them, which the checker would not always let pass."""

from __future__ import annotations

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


def test_a_condition_that_is_not_known_is_named_with_its_input():
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    one = branch([node("Relu", ["x"], ["r"])], ["r"])
    other = branch([node("Neg", ["x"], ["r"])], ["r"])
    proto = model(
        [node("If", ["flag"], ["y"], name="choose", then_branch=one, else_branch=other)],
        [tensor("x", [2, 3]), flag], [tensor("y", None)],
    )  # fmt: skip
    with pytest.raises(UnsupportedNodesError, match="If 'choose', condition: .*'flag'") as raised:
        load(proto)
    assert raised.value.nodes[0].inputs == ("flag",)
    for value in (True, False):
        graph = load(proto, constants={"flag": np.array(value)})
        found = Engine(graph, device="cpu").run({"x": X})["y"]
        np.testing.assert_array_equal(found, np.maximum(X, 0) if value else -X)


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
