"""Operators of com.microsoft, beside ONNX Runtime; control flow; what is refused by name."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import tolerances
from cpu_time import cpu_seconds
from onnx import TensorProto, helper
from onnx_models import model, onnxruntime_outputs, tensor

from cnn_engine import Engine
from cnn_engine.errors import InputError
from cnn_engine.graph.onnx import UnsupportedNodesError, importer, load

node = helper.make_node
MICROSOFT = [helper.make_opsetid("com.microsoft", 1)]


def some(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def run(operator, arrays, known=(), outputs=1, domain="com.microsoft", opset=17, **attributes):
    """Returns the outputs of one node, ours and ONNX Runtime's."""
    names = [f"x{i}" if a is not None else "" for i, a in enumerate(arrays)]
    fed = {n: a for i, (n, a) in enumerate(zip(names, arrays, strict=True)) if n and i not in known}
    one = node(operator, names, [f"y{i}" for i in range(outputs)], domain=domain, **attributes)
    proto = model(
        [one], [tensor(n, a.shape) for n, a in fed.items()],
        [helper.make_empty_tensor_value_info(f"y{i}") for i in range(outputs)],
        {names[i]: arrays[i] for i in known if arrays[i] is not None}, opset, opsets=MICROSOFT,
    )  # fmt: skip
    found = Engine(proto, device="cpu").run(fed)
    return [found[f"y{i}"] for i in range(outputs)], onnxruntime_outputs(proto, fed)


def same(*given, terms=64, **more):
    for one, other in zip(*run(*given, **more), strict=True):
        assert one.shape == other.shape
        tolerances.assert_close(
            one, other, tolerances.sum_of_products(terms, 4 + np.abs(np.float64(other)))
        )


@pytest.mark.parametrize(
    ("activation", "params"),
    [
        ("Relu", []), ("Tanh", []), ("Sigmoid", []), ("LeakyRelu", [0.2]), ("Clip", [-0.5, 0.7]),
        ("HardSigmoid", [0.3, 0.4]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("added", [False, True])
def test_convolutions(rng, activation, params, added):
    more = {"activation_params": params} if params else {}
    arrays = [some(rng, 2, 4, 6, 7), some(rng, 6, 2, 3, 3), some(rng, 6)]
    if added:
        arrays.append(some(rng, 2, 6, 6, 7))
    same(
        "FusedConv", arrays, known=(1, 2), activation=activation, group=2, pads=[1, 1, 1, 1],
        kernel_shape=[3, 3], **more,
    )  # fmt: skip


def test_convolutions_of_images_whose_channels_are_last(rng):
    x, weight, bias = some(rng, 2, 6, 7, 4), some(rng, 6, 4, 3, 3), some(rng, 6)
    one = node("NhwcConv", ["x", "w", "b"], ["y"], domain="com.microsoft", strides=[2, 1])
    proto = model(
        [one], [tensor("x", x.shape)], [tensor("y", None)], {"w": weight, "b": bias},
        opsets=MICROSOFT,
    )  # fmt: skip
    plain = model(
        [node("Conv", ["x", "w", "b"], ["y"], strides=[2, 1])],
        [tensor("x", (2, 4, 6, 7))], [tensor("y", None)], {"w": weight, "b": bias},
    )  # fmt: skip
    turned = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    wanted = onnxruntime_outputs(plain, {"x": turned})[0].transpose(0, 2, 3, 1)
    found = Engine(proto, device="cpu").run({"x": x})["y"]
    tolerances.assert_close(found, wanted, tolerances.sum_of_products(36, 10 + np.abs(wanted)))


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu"])
def test_gemm(rng, activation):
    arrays = [some(rng, 3, 4), some(rng, 5, 4), some(rng, 5)]
    same("FusedGemm", arrays, known=(1, 2), activation=activation, activation_alpha=0.3, transB=1,
         alpha=0.5)  # fmt: skip


@pytest.mark.parametrize("a", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("b", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_matrices_that_are_turned(rng, a, b):
    """Of each, whether the last two dimensions and whether the batch and the rows are exchanged."""

    def shape(rows, columns, turned, batch):
        rows, columns = (columns, rows) if turned else (rows, columns)
        return (rows, 2, 3, columns) if batch else (2, 3, rows, columns)

    arrays = [some(rng, *shape(4, 5, *a)), some(rng, *shape(5, 6, *b))]
    same("FusedMatMul", arrays, transA=a[0], transBatchA=a[1], transB=b[0], transBatchB=b[1],
         alpha=0.25)  # fmt: skip


@pytest.mark.parametrize("operator", ["Gelu", "BiasGelu", "FastGelu", "QuickGelu"])
def test_gelus(rng, operator):
    arrays = [some(rng, 3, 8)] + ([some(rng, 8)] if operator in ("BiasGelu", "FastGelu") else [])
    same(operator, arrays)
    if operator in ("FastGelu", "QuickGelu"):
        same(operator, arrays[:1])


@pytest.mark.parametrize("simplified", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_norms_of_sums(rng, simplified, bias):
    operator = "SkipSimplifiedLayerNormalization" if simplified else "SkipLayerNormalization"
    arrays = [some(rng, 2, 3, 8), some(rng, 2, 3, 8), some(rng, 8)]
    arrays += [] if simplified else [some(rng, 8)]
    arrays += [some(rng, 8)] if bias else []
    same(operator, arrays, epsilon=1e-3)


def test_norms_under_other_names(rng):
    same(
        "SimplifiedLayerNormalization", [some(rng, 2, 3, 8), some(rng, 8)], domain="", epsilon=1e-4
    )


def test_functions_that_are_not_known(rng):
    with pytest.raises(UnsupportedNodesError, match="activation: 'Mystery' is not known"):
        run("FusedConv", [some(rng, 1, 1, 3, 3), some(rng, 1, 1, 1, 1)], activation="Mystery")
    with pytest.raises(UnsupportedNodesError, match="not supported in the domain 'com.microsoft'"):
        run("BeamSearch", [some(rng, 2)])


@pytest.mark.parametrize(
    "operator", ["RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"]
)
def test_random_numbers_are_refused(rng, operator):
    with pytest.raises(
        UnsupportedNodesError, match=f"{operator} .*random numbers are not supported"
    ):
        run(operator, [some(rng, 2, 3)], domain="")


# -- loops ---------------------------------------------------------------------------------------


def graph_of(nodes, inputs, outputs, constants=None):
    return model(nodes, inputs, outputs, constants).graph


def looped(rng, count, condition=None, names=("y", "all"), **more):
    """x doubled or added to, ``count`` times, beside every step."""
    body = graph_of(
        [
            node("Mul", ["state", "w"], ["next"]),
            node("Add", ["next", "outer"], ["part"]),
            node("Less", ["i", "last"], ["goes_on"]),
        ],
        [tensor("i", [], TensorProto.INT64), tensor("on", [], TensorProto.BOOL), tensor("state", [2])],
        [tensor("goes_on", [], TensorProto.BOOL), tensor("next", [2]), tensor("part", [2])],
        {"w": np.float32([2, 3]), "last": np.int64(more.pop("last", 99))},
    )  # fmt: skip
    constants = {} if count is None else {"m": np.int64(count)}
    constants |= {} if condition is None else {"c": np.asarray(condition)}
    given = ["" if count is None else "m", "" if condition is None else "c", "x"]
    return model(
        [node("Loop", given, list(names), body=body)], [tensor("x", [2]), tensor("outer", [2])],
        [tensor(name, None) for name in names if name], constants,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("count", "condition", "last"),
    [(3, None, 99), (3, True, 99), (4, True, 1), (None, True, 2), (0, True, 9), (3, False, 9)],
)
def test_loops_are_written_out(rng, count, condition, last):
    proto = looped(rng, count, condition, last=last)
    inputs = {"x": some(rng, 2), "outer": some(rng, 2)}
    found = Engine(proto, device="cpu").run(inputs)
    for one, other in zip(found.values(), onnxruntime_outputs(proto, inputs), strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_equal(one, other)


def nested(rng, count):
    """A loop in a loop, of ``count`` iterations each."""
    proto = looped(rng, count, names=("y",))
    inner = proto.graph.node[0]
    (body,) = (a.g for a in inner.attribute if a.name == "body")
    del body.output[2:]
    outer = graph_of(
        [node("Identity", ["on"], ["goes_on"]), inner],
        [tensor("j", [], TensorProto.INT64), tensor("on", [], TensorProto.BOOL), tensor("x", [2])],
        [tensor("goes_on", [], TensorProto.BOOL), tensor("y", [2])],
    )
    return model(
        [node("Loop", ["m", "", "first"], ["z"], body=outer)],
        [tensor("first", [2]), tensor("outer", [2])], [tensor("z", None)], {"m": np.int64(count)},
    )  # fmt: skip


def test_loops_in_loops(rng):
    proto = nested(rng, 3)
    inputs = {"first": some(rng, 2), "outer": some(rng, 2)}
    found = Engine(proto, device="cpu").run(inputs)["z"]
    np.testing.assert_allclose(found, inputs["first"] * np.float32([2**9, 3**9]), rtol=1e-5)


def test_a_loop_without_end_that_ends_by_its_condition(rng):
    assert load(looped(rng, 2**63 - 1, True, last=3)).nodes


def test_loops_that_cannot_be_written_out(rng, monkeypatch):
    monkeypatch.setattr(importer, "MOST_WRITTEN_OUT", 60)
    for proto in (looped(rng, 10**12), looped(rng, None, True, last=10**9), nested(rng, 7)):
        with pytest.raises(UnsupportedNodesError, match="expected loops of up to 60 nodes when"):
            load(proto)


@pytest.mark.parametrize("backwards", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_scans_are_written_out(rng, backwards, axis):
    body = graph_of(
        [node("Add", ["sum", "part"], ["next"]), node("Mul", ["next", "part"], ["made"])],
        [tensor("sum", [3]), tensor("part", [3])], [tensor("next", [3]), tensor("made", [3])],
    )  # fmt: skip
    x = some(rng, *((4, 3) if axis == 0 else (3, 4)))
    scan = node(
        "Scan", ["first", "x"], ["last", "all"], body=body, num_scan_inputs=1,
        scan_input_axes=[axis], scan_input_directions=[backwards], scan_output_axes=[-1],
        scan_output_directions=[1 - backwards],
    )  # fmt: skip
    proto = model(
        [scan],
        [tensor("first", [3]), tensor("x", x.shape)],
        [tensor("last", None), tensor("all", None)],
    )
    inputs = {"first": some(rng, 3), "x": x}
    found = Engine(proto, device="cpu").run(inputs)
    for one, other in zip(found.values(), onnxruntime_outputs(proto, inputs), strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_equal(one, other)


def test_what_a_body_lacks_is_named_once_an_iteration(rng):
    proto = looped(rng, 2)
    (body,) = (a.g for a in proto.graph.node[0].attribute if a.name == "body")
    body.node[1].op_type = "ImageDecoder"
    del body.node[1].input[1:]
    with pytest.raises(UnsupportedNodesError, match="ImageDecoder") as raised:
        load(proto)
    assert {one.operator for one in raised.value.nodes} == {"ImageDecoder"}


def test_a_body_of_other_inputs(rng):
    proto = looped(rng, 2)
    (body,) = (a.g for a in proto.graph.node[0].attribute if a.name == "body")
    del body.input[2]
    with pytest.raises(InputError, match="body: expected 3 inputs and 3 outputs, found 2 and 3"):
        load(proto)


def test_many_float16_outputs_take_no_time_squared():
    """Renaming what is cast goes over the nodes once for all outputs."""

    def seconds(count):
        nodes = [node("Relu", ["x"], [f"y{i}"]) for i in range(count)]
        outputs = [tensor(f"y{i}", [2], TensorProto.FLOAT16) for i in range(count)]
        proto = model(nodes, [tensor("x", [2], TensorProto.FLOAT16)], outputs)
        onnx.checker.check_model(proto)
        return cpu_seconds(lambda: load(proto))

    seconds(50)
    # 96 where each goes over all nodes; the least of three, since others disturb.
    assert min(seconds(3200) for _ in range(3)) < 45 * min(seconds(200) for _ in range(3))


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_blocks_go_to_channels_in_either_order(mode):
    x = np.arange(2 * 4 * 6, dtype=np.float32).reshape(1, 2, 4, 6)
    proto = model(
        [node("SpaceToDepth", ["x"], ["y"], blocksize=2, mode=mode)], [tensor("x", x.shape)],
        [tensor("y", None)], opset=25,
    )  # fmt: skip
    y = Engine(proto, device="cpu").run({"x": x})["y"]
    for c, i, j in np.ndindex(2, 2, 2):
        at = c * 4 + i * 2 + j if mode == "CRD" else (i * 2 + j) * 2 + c
        np.testing.assert_array_equal(y[0, at], x[0, c, i::2, j::2])
