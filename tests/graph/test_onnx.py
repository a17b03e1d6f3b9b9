"""ONNX models as graphs: versions, folding, batches, what is refused, and files that mean harm."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_models import model, one_node, tensor

import cnn_engine
from cnn_engine.errors import InputError, UnsupportedError
from cnn_engine.graph.onnx import UnsupportedNodesError, load
from cnn_engine.graph.reference import reference
from cnn_engine.operators.linear import Linear

node = helper.make_node


def same_as_onnx(proto: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> None:
    """Asserts that the graph computes what ONNX's own evaluator does."""
    graph = load(proto)
    wanted = ReferenceEvaluator(proto).run(None, inputs)
    found = reference(graph, {v.name: inputs[v.name] for v in graph.inputs})
    for name, array in zip(graph.outputs, wanted, strict=True):
        assert graph.values[name].dtype == array.dtype.name
        np.testing.assert_allclose(found[name], array, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(1, 4, 6), (3, 4, 2, 5), (5, 4)])
def test_batch_norm_by_its_own_statistics(shape):
    """Training's, which exported weight standardisation uses; with the running statistics."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape), *rng.normal(size=(3, 4)), rng.uniform(1, 2, 4)]
    proto, inputs = one_node(
        "BatchNormalization", [a.astype(np.float32) for a in arrays], 15, 3,
        training_mode=1, momentum=0.75, epsilon=1e-3,
    )  # fmt: skip
    same_as_onnx(proto, inputs)
    known, _ = one_node(
        "BatchNormalization", [a.astype(np.float32) for a in arrays], 15, 3, known=range(5),
        training_mode=1, momentum=0.75, epsilon=1e-3,
    )  # fmt: skip
    same_as_onnx(known, {})
    assert not load(known).nodes or all(n.op.kind == "copy" for n in load(known).nodes)


def test_load_is_the_packages():
    assert cnn_engine.load is load


# -- versions of operators ---------------------------------------------------------------------------

X4 = np.linspace(-2, 3, 2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("operator", "arrays", "known", "opset", "attributes"),
    [
        ("Clip", [X4], (), 7, {"min": -1.0, "max": 1.0}),
        ("Clip", [X4, np.float32(-1), None], (1,), 13, {}),
        ("Clip", [X4, None, np.float32(1)], (), 13, {}),
        ("Pad", [X4], (), 7, {"pads": [0, 0, 1, 2, 0, 0, 0, 1], "mode": "reflect"}),
        ("Pad", [X4, np.array([0, 0, 1, 2, 0, 0, 0, 1]), np.float32(3)], (1, 2), 13, {}),
        ("Pad", [X4, np.array([1, 2]), None, np.array([-1])], (1, 3), 18, {}),
        ("Slice", [X4], (), 9, {"starts": [1], "ends": [-1], "axes": [2]}),
        ("Slice", [X4, np.array([-1]), np.array([-9]), np.array([3]), np.array([-2])],
         (1, 2, 3, 4), 13, {}),
        ("Squeeze", [X4[:1]], (), 7, {"axes": [0]}),
        ("Squeeze", [X4[:1], np.array([0])], (1,), 13, {}),
        ("Unsqueeze", [X4], (), 7, {"axes": [0, 5]}),
        ("Unsqueeze", [X4, np.array([-1])], (1,), 13, {}),
        ("ReduceMean", [X4], (), 13, {"axes": [2, 3]}),
        ("ReduceMean", [X4, np.array([2, 3])], (1,), 18, {"keepdims": 0}),
        ("ReduceSum", [X4, np.array([1])], (1,), 13, {}),
        ("ReduceSum", [X4], (), 13, {"noop_with_empty_axes": 1}),
        ("Softmax", [X4], (), 13, {"axis": 2}),
        ("LogSoftmax", [X4], (), 13, {}),
        ("Dropout", [X4], (), 7, {"ratio": 0.3}),
        ("Dropout", [X4, np.float32(0.3), np.array(False)], (1, 2), 13, {}),
        ("Upsample", [X4, np.array([1, 1, 2, 2], np.float32)], (1,), 9, {"mode": "nearest"}),
        ("Resize", [X4, None, np.array([1, 1, 2.5, 0.5], np.float32)], (2,), 13, {"mode": "linear"}),
        ("Resize", [X4, None, None, np.array([2, 3, 7, 3])], (3,), 13,
         {"mode": "cubic", "coordinate_transformation_mode": "align_corners"}),
        ("Resize", [X4.reshape(2, 6, 10)[..., :7], None, np.array([1, 1, 0.5], np.float32)], (2,), 19,
         {"nearest_mode": "ceil", "coordinate_transformation_mode": "half_pixel_symmetric"}),
        ("Flatten", [X4], (), 9, {"axis": -2}),
        ("Gemm", [X4[0, 0], X4[1, 1]], (), 13, {"transB": 1, "alpha": 0.5}),
        ("Gemm", [X4[0, 0], X4[1, 1], X4[0, 0, :1]], (), 13, {"transA": 1, "beta": 2.0}),
        ("GroupNormalization", [X4[:, [0, 1, 2, 0]], np.ones(2, np.float32), np.ones(2, np.float32)],
         (1, 2), 18, {"num_groups": 2}),
        ("PRelu", [X4, np.float32([[[0.1]], [[0.2]], [[0.3]]])], (1,), 16, {}),
        ("Mean", [X4, X4 + 1, X4[:1]], (), 13, {}),
        ("AveragePool", [X4], (), 19,
         {"kernel_shape": [2, 3], "strides": [2, 2], "pads": [0, 1, 1, 1], "count_include_pad": 1}),
        ("MaxPool", [X4[0]], (), 12, {"kernel_shape": [2], "ceil_mode": 1, "strides": [2]}),
        ("Conv", [X4[:, :, 0], X4[:2, :, 0, :2], np.ones(2, np.float32)], (1, 2), 11,
         {"pads": [1, 0], "dilations": [2]}),
        ("ConvTranspose", [X4, X4[:1, :, :2, :3].transpose(1, 0, 2, 3)], (1,), 11,
         {"strides": [2, 1], "output_padding": [1, 0], "pads": [0, 1, 1, 0]}),
    ],
)  # fmt: skip
def test_versions_of_operators(operator, arrays, known, opset, attributes):
    proto, inputs = one_node(operator, arrays, opset, known=known, **attributes)
    same_as_onnx(proto, inputs)


def test_softmax_took_all_from_its_axis_before_opset_13():
    proto, inputs = one_node("Softmax", [X4], 11, axis=2)
    rows = np.exp(X4.astype(np.float64)).reshape(6, 20)
    wanted = (rows / rows.sum(axis=1, keepdims=True)).reshape(X4.shape)
    np.testing.assert_allclose(reference(load(proto), inputs)["y0"], wanted, rtol=1e-12)


def test_upsample_with_scales_as_attribute():
    proto, inputs = one_node("Upsample", [X4], 7, scales=[1.0, 1.0, 2.0, 3.0])
    wanted = X4.repeat(2, axis=2).repeat(3, axis=3)
    np.testing.assert_array_equal(reference(load(proto), inputs)["y0"], wanted)


@pytest.mark.parametrize(
    ("rule", "pads"),
    [("SAME_UPPER", [0, 0, 1, 1]), ("SAME_LOWER", [1, 1, 0, 0]), ("VALID", [0] * 4)],
)
def test_padding_by_rule(rule, pads):
    """Sizes 4 and 5, kernels 3 and 2, strides 2: one row and one column are missing."""
    window = {"kernel_shape": [3, 2], "strides": [2, 2]}
    by_rule = load(one_node("MaxPool", [X4], 12, auto_pad=rule, **window)[0])
    by_number = load(one_node("MaxPool", [X4], 12, pads=pads, **window)[0])
    assert by_rule.nodes == by_number.nodes


def test_axis_to_broadcast_along_before_opset_7():
    proto, inputs = one_node("Add", [X4, np.float32([1, 2, 3])], 6, axis=1, broadcast=1)
    found = reference(load(proto), inputs)["y0"]
    np.testing.assert_allclose(found, X4 + np.float32([1, 2, 3])[:, None, None])


def test_gemm_of_a_classifier_is_linear():
    proto, _ = one_node("Gemm", [X4[0, 0], X4[1, 1], np.zeros(4, np.float32)], 13, transB=1)
    (only,) = load(proto).nodes
    assert only.op == Linear()
    assert only.covers == ("Gemm_0",)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_conv_matches_onnxs_evaluator(data):
    groups, rank = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    filters, channels = (groups * data.draw(st.integers(1, 2)) for _ in range(2))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    sizes = [data.draw(st.integers(5, 8)) for _ in range(rank)]
    attributes = {
        "group": groups,
        "strides": [data.draw(st.integers(1, 3)) for _ in range(rank)],
        "dilations": [data.draw(st.integers(1, 2)) for _ in range(rank)],
    }
    rule = data.draw(st.sampled_from(["pads", "SAME_UPPER", "VALID"]))
    if rule == "pads":
        attributes["pads"] = [data.draw(st.integers(0, 2)) for _ in range(2 * rank)]
    else:
        attributes["auto_pad"] = rule
        attributes["dilations"] = [1] * rank  # ONNX's evaluator ignores dilations here
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, channels, *sizes)).astype(np.float32)
    w = rng.normal(size=(filters, channels // groups, *kernel)).astype(np.float32)
    proto, inputs = one_node("Conv", [x, w], 11, known=(1,), **attributes)
    same_as_onnx(proto, inputs)


# -- folding -----------------------------------------------------------------------------------------


def flatten_by_shape(batch="N"):
    """What exporters write for ``x.reshape(len(x), -1)``."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"], axis=0),
        node("Unsqueeze", ["n", "axes"], ["row"]),
        node("Concat", ["row", "rest"], ["shape"], axis=0),
        node("Reshape", ["x", "shape"], ["y"]),
    ]
    constants = {"zero": np.int64(0), "axes": np.int64([0]), "rest": np.int64([-1])}
    return model(nodes, [tensor("x", [batch, 2, 3])], [tensor("y", None)], constants)


def test_shape_arithmetic_folds_away():
    graph = load(flatten_by_shape())
    assert [n.op.kind for n in graph.nodes] == ["reshape"]
    assert not graph.constants
    assert [note.what for note in graph.notes] == ["Gather_1", "Unsqueeze_2", "Concat_3"]


def test_another_batch_is_made_from_the_file():
    graph = load(flatten_by_shape(), batch=2)
    assert (graph.batch, graph.batched, graph.values["y"].shape) == (2, ("x",), (2, 6))
    assert graph.with_batch(5).values["y"].shape == (5, 6)


def test_integers_fold_exactly():
    big = np.int64(2**53 + 1)
    nodes = [node("Mul", ["a", "one"], ["b"]), node("Sub", ["b", "c"], ["y"])]
    constants = {"a": big, "one": np.int64(1), "c": np.int64(2**53)}
    graph = load(model(nodes, [], [tensor("y", [], TensorProto.INT64)], constants))
    assert graph.nodes == ()
    assert reference(graph, {})["y"] == 1


def test_weights_computed_from_weights_fold():
    """Weight standardisation, as NFNets have it."""
    nodes = [
        node("ReduceMean", ["w"], ["m"], axes=[1, 2, 3]),
        node("Sub", ["w", "m"], ["v"]),
        node("Conv", ["x", "v"], ["y"]),
    ]
    w = np.linspace(0, 1, 54, dtype=np.float32).reshape(2, 3, 3, 3)
    proto = model(nodes, [tensor("x", [1, 3, 5, 5])], [tensor("y", None)], {"w": w}, opset=13)
    graph = load(proto)
    assert [n.op.kind for n in graph.nodes] == ["conv2d"]
    assert graph.constants["v"].dtype == np.float32


def test_initializers_as_inputs_are_constants():
    proto = model(
        [node("Add", ["x", "b"], ["y"])],
        [tensor("x", [2]), tensor("b", [2])],
        [tensor("y", [2])],
        {"b": np.float32([1, 2])},
    )
    graph = load(proto)
    assert [v.name for v in graph.inputs] == ["x"]


def test_inputs_given_as_constants():
    proto, _ = one_node("Reshape", [X4, np.int64([6, 20])])
    graph = load(proto, constants={"x1": np.int64([6, 20])})
    assert [v.name for v in graph.inputs] == ["x0"]
    assert graph.values["y0"].shape == (6, 20)


def test_local_functions_are_written_out():
    function = helper.make_function(
        "mine", "twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 20)],
    )  # fmt: skip
    proto = model(
        [node("twice", ["x"], ["y"], domain="mine")], [tensor("x", [2])], [tensor("y", [2])],
        functions=[function], opsets=[helper.make_opsetid("mine", 1)],
    )  # fmt: skip
    assert [n.op.kind for n in load(proto).nodes] == ["add"]


# -- dimensions --------------------------------------------------------------------------------------


def relu(shape) -> onnx.ModelProto:
    return model([node("Relu", ["x"], ["y"])], [tensor("x", shape)], [tensor("y", None)])


def test_open_dimensions_may_be_fixed():
    graph = load(relu(["N", 3, "H", "W"]), input_shape={"x": (2, 3, 8, 9)})
    assert graph.values["y"].shape == (2, 3, 8, 9)
    assert graph.with_batch(5).values["y"].shape == (5, 3, 8, 9)  # the batch stays open
    with pytest.raises(
        InputError, match=r"expected a shape for \[N, 3, H, W\], found \[2, 4, 8, 9\]"
    ):
        load(relu(["N", 3, "H", "W"]), input_shape={"x": (2, 4, 8, 9)})
    with pytest.raises(InputError, match="expected inputs of the model .x., found 'z'"):
        load(relu([1]), input_shape={"z": (1,)})


def test_a_fixed_batch_is_fixed():
    with pytest.raises(InputError, match="found its inputs fixed"):
        load(relu([1, 3])).with_batch(2)


def test_a_dimension_of_the_batchs_name_is_the_batch():
    assert load(relu(["N", "N"]), batch=4).values["y"].shape == (4, 4)


# -- what is refused ---------------------------------------------------------------------------------


def test_all_unsupported_nodes_at_once():
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("TfIdfVectorizer", ["a"], ["b"], name="words"),
        node("GroupQueryAttention", ["b"], ["c"], domain="com.microsoft"),
        node("BatchNormalization", ["x", "s", "s", "s", "s"], ["d"], spatial=0, name="bn"),
        node("Relu", ["c"], ["y"]),
    ]
    s = {"s": np.ones(3, np.float32)}
    proto = model(nodes, [tensor("x", [1, 3])], [tensor("y", None)], s, opset=15)
    with pytest.raises(UnsupportedNodesError) as raised:
        load(proto)
    assert [(n.name, n.operator, n.attribute) for n in raised.value.nodes] == [
        ("words", "TfIdfVectorizer", None),
        ("GroupQueryAttention_2", "GroupQueryAttention", None),
        ("bn", "BatchNormalization", "spatial"),
    ]
    assert "\n" not in str(raised.value)
    assert "3 nodes" in str(raised.value)


@pytest.mark.parametrize(
    ("proto", "message"),
    [
        (model([], [tensor("x", [1], TensorProto.STRING)], [tensor("x", [1])]), "elements of type STRING"),
        (model([], [tensor("x", [1])], [tensor("x", [1])], opset=5), "expected an opset from 6"),
        (model([], [tensor("x", [1])], [tensor("x", [1])], opset=99), "found 99"),
        (one_node("Cast", [X4], to=TensorProto.INT4)[0], "Cast 'Cast_0', to: elements of type INT4"),
        (one_node("Relu", [X4], alpha=0.5)[0], "alpha: the attribute is not known"),
    ],
)  # fmt: skip
def test_what_the_engine_lacks(proto, message):
    with pytest.raises(UnsupportedError) as raised:
        load(proto)
    assert message in str(raised.value)


# -- files -------------------------------------------------------------------------------------------


def test_a_path_and_its_bytes(tmp_path):
    path = tmp_path / "net.onnx"
    onnx.save(relu([2]), path)
    for source in (path, str(path), path.read_bytes()):
        assert load(source).outputs == ("y",)
    assert load(path).name == "net"


def with_external(tmp_path, location="w.bin", **changes):
    tmp_path.mkdir(exist_ok=True)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], data_location=1)
    for key, value in {"location": location, "offset": 8, "length": 12, **changes}.items():
        weight.external_data.add(key=key, value=str(value))
    graph = helper.make_graph(
        [node("Add", ["x", "w"], ["y"])], "test", [tensor("x", [3])], [tensor("y", [3])], [weight]
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = tmp_path / "net.onnx"
    path.write_bytes(proto.SerializeToString())
    (tmp_path / "w.bin").write_bytes(np.arange(5, dtype="<f4").tobytes())
    return path


def test_external_data(tmp_path):
    assert load(with_external(tmp_path)).constants["w"].tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"location": "../w.bin"}, "expected external data beside the model, found '../w.bin'"),
        ({"location": "/etc/passwd"}, "expected external data beside the model"),
        ({"location": ""}, "expected external data beside the model"),
        ({"location": "none.bin"}, "expected the file 'none.bin' beside the model"),
        ({"offset": 12}, "found 12 claimed, 20 in the file"),
        ({"offset": -4}, "expected 12 bytes from -4"),
        ({"length": 2**60}, "expected 12 bytes from 8"),
        ({"offset": "x"}, "expected whole numbers"),
    ],
)
def test_external_data_that_is_not_there(tmp_path, changes, message):
    with pytest.raises(InputError) as raised:
        load(with_external(tmp_path / "model", **changes))
    assert message in str(raised.value)


def test_external_data_through_a_link_out_of_the_folder(tmp_path):
    path = with_external(tmp_path / "model", location="link.bin")
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    (tmp_path / "model" / "link.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(InputError, match="expected external data beside the model"):
        load(path)


def test_external_data_of_bytes_asks_for_the_path(tmp_path):
    with pytest.raises(InputError, match="load such a model by its path"):
        load(with_external(tmp_path).read_bytes())


def lying_weight(dims, raw=b"") -> onnx.ModelProto:
    proto = relu([1])
    proto.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=dims, raw_data=raw)
    return proto


def bomb() -> onnx.ModelProto:
    """Functions that double: two to the 40 nodes, were they written out."""
    functions = []
    for level in range(40):
        inner = ("Add", "") if level == 0 else (f"f{level - 1}", "mine")
        body = [
            node(inner[0], ["a", "a"][: 2 if level == 0 else 1], ["m"], domain=inner[1]),
            node(inner[0], ["m", "m"][: 2 if level == 0 else 1], ["b"], domain=inner[1]),
        ]
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
        functions.append(helper.make_function("mine", f"f{level}", ["a"], ["b"], body, opsets))
    return model(
        [node("f39", ["x"], ["y"], domain="mine")], [tensor("x", [2])], [tensor("y", [2])],
        functions=functions, opsets=[helper.make_opsetid("mine", 1)],
    )  # fmt: skip


def calls_itself() -> onnx.ModelProto:
    opsets = [helper.make_opsetid("mine", 1)]
    function = helper.make_function(
        "mine", "f", ["a"], ["b"], [node("f", ["a"], ["b"], domain="mine")], opsets
    )
    return model(
        [node("f", ["x"], ["y"], domain="mine")], [tensor("x", [2])], [tensor("y", [2])],
        functions=[function], opsets=opsets,
    )  # fmt: skip


CIRCLE = model(
    [node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"])],
    [tensor("x", [1])], [tensor("b", [1])],
)  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "0 bytes without a graph"),
        (b"\x00" * 100, "expected an ONNX model, found 100 bytes"),
        (relu([1]).SerializeToString()[:-7], "expected an ONNX model"),
        (CIRCLE, "input 'b': the nodes that make it wait for this one (a circle)"),
        (model([node("Relu", ["w"], ["y"])], [], [tensor("y", [1])]), "input 'w': no input"),
        (model([node("Relu", ["x"], ["x"])], [tensor("x", [1])], [tensor("x", [1])]), "found 'x' twice"),
        (model([], [tensor("x", [1])], [tensor("y", [1])]), "output 'y': no node makes it"),
        (lying_weight([2**40]), "expected 4398046511104 bytes for float32 [1099511627776], found 0"),
        (lying_weight([2], bytes(7)), "expected 8 bytes for float32 [2], found 7"),
        (lying_weight([-1]), "expected dimensions of at least 0, found [-1]"),
        (one_node("ConstantOfShape", [np.int64([2**40])], known=(0,))[0], "expected a constant of up to"),
        (one_node("Range", [np.int64(0), np.int64(2**60), np.int64(1)], known=(0, 1, 2))[0],
         "expected a constant of up to"),
        (one_node("Expand", [X4, np.int64([2**40, 1, 1, 1, 1])], known=(1,))[0], "at most 2^40 elements"),
        (one_node("Conv", [X4[:, :, :2], X4])[0], "a window of at most the padded input, found 4 over 2"),
        (one_node("Concat", [X4, X4[:, :1]], axis=0)[0], "alike but for dimension 0"),
        (one_node("Split", [X4], num_outputs=65536)[0], "num_outputs: expected 1 as named, found 65536"),
        (bomb(), "expected functions that grow to up to"),
        (calls_itself(), "functions that do not call themselves, found 'f'"),
        (one_node("Add", [X4, np.float32([np.nan])], known=(1,))[0],
         "constant 'x1': expected numbers, found NaN"),
    ],
)  # fmt: skip
def test_files_at_fault_take_one_line(source, message):
    with pytest.raises(InputError) as raised:
        load(source)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 2000


def test_names_from_files_stay_on_the_line():
    proto = model([node("Nothing\n\x1b", ["x"], ["y"])], [tensor("x", [1])], [tensor("y", None)])
    with pytest.raises(UnsupportedError) as raised:
        load(proto)
    assert "Nothing\\n\\x1b" in str(raised.value)
    proto.graph.node[0].op_type = "N" * 10_000
    with pytest.raises(UnsupportedError) as raised:
        load(proto)
    assert len(str(raised.value)) < 4100


def test_names_that_are_no_text():
    data = relu([1]).SerializeToString().replace(b"Relu", b"\x93elu")
    with pytest.raises(InputError, match="expected names in UTF-8"):
        load(data)


@pytest.mark.parametrize("dims", [[0, 2**60, 2**60], [1] * 40])
def test_dimensions_that_no_array_has(dims):
    with pytest.raises(InputError, match="tensor 'w': expected"):
        load(lying_weight(dims))


def test_attributes_of_another_kind():
    proto, _ = one_node("Einsum", [X4], equation=["ij", "jk"])
    with pytest.raises(UnsupportedError, match="equation: expected"):
        load(proto)


def test_what_is_no_model():
    with pytest.raises(
        InputError, match="expected a path, bytes or an onnx.ModelProto, found builtins.int"
    ):
        load(5)
    with pytest.raises(InputError, match="none.onnx: expected an ONNX file that can be read"):
        load("none.onnx")
    with pytest.raises(InputError, match="that can be read, found: embedded null byte"):
        load("a\0.onnx")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(InputError) as error:
        load(tmp_path)
    assert str(error.value) == f"{tmp_path}: expected an ONNX file, found a folder"


def test_what_never_ends_is_no_file(tmp_path):
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)  # nobody writes to it: to open it would wait for ever
    for path in (pipe, "/dev/zero"):
        with pytest.raises(InputError, match="expected an ONNX file, found a special file"):
            load(path)


def test_large_results_of_constants_stay_nodes():
    """Folding must not fill memory from a file of a few bytes."""
    nodes = [node("Expand", ["a", "s"], ["b"]), node("ReduceMax", ["b"], ["y"], keepdims=0)]
    constants = {"a": np.float32([1]), "s": np.int64([2**30])}
    graph = load(model(nodes, [], [tensor("y", [])], constants))
    assert [n.op.kind for n in graph.nodes] == ["expand", "reduce_max"]


def test_a_mask_of_large_images_takes_no_memory():
    nodes = [node("Dropout", ["x"], ["y", "mask"])]
    proto = model(nodes, [tensor("x", [2**20, 2**19])], [tensor("y", None)])
    assert [n.op.kind for n in load(proto).nodes] == ["copy"]


def test_long_dimensions_beside_empty_ones_are_not_folded():
    zeros, ends = np.int64([0]), np.int64([2**39])
    inner = [node("Slice", ["x", "zeros", "ends", "one"], ["a"]), node("Relu", ["a"], ["y"])]
    proto = model(
        [node("ConstantOfShape", ["shape"], ["x"]), *inner], [], [tensor("y", None)],
        {"shape": np.int64([0, 2**39]), "zeros": zeros, "ends": ends, "one": np.int64([1])},
    )  # fmt: skip
    assert [n.op.kind for n in load(proto).nodes] == ["slice", "relu"]


def test_tensors_in_every_field_of_a_protobuf():
    for array in (
        np.float32([1.5, -2]), np.float64([1.5]), np.float16([1.5, -2]), np.int8([-3]),
        np.uint8([250]), np.int16([-300]), np.uint16([65535]), np.int32([-7]), np.uint32([2**32 - 1]),
        np.int64([-(2**40)]), np.uint64([2**63]), np.array([True, False]),
    ):  # fmt: skip
        number = helper.np_dtype_to_tensor_dtype(array.dtype)
        for raw in (False, True):
            made = (
                numpy_helper.from_array(array, "w")
                if raw
                else helper.make_tensor("w", number, array.shape, array.tolist())
            )
            proto = model([], [], [tensor("w", array.shape, number)])
            proto.graph.initializer.append(made)
            found = load(proto).constants["w"]
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
