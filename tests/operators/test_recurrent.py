"""RNN, GRU and LSTM: beside ONNX Runtime through the importer, and the kernels beside their references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tolerances
from onnx import numpy_helper
from onnx_models import one_node, onnxruntime_outputs
from test_kernel_rows import check, place  # noqa: F401

from cnn_engine import Engine
from cnn_engine.engine import inspection
from cnn_engine.errors import InputError
from cnn_engine.graph.graph import Graph, Node
from cnn_engine.graph.onnx import UnsupportedNodesError, load
from cnn_engine.graph.reference import reference
from cnn_engine.operators import unary
from cnn_engine.operators.operator import Value
from cnn_engine.operators.recurrent import DynamicLstm, Gru, Lstm, Rnn

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def layer(rng, operator, steps, batch, features, hidden, direction="forward", states=False, lengths=None,
          peepholes=False, bias=True, weights=(1, 2, 3), **attributes):  # fmt: skip
    """A model of one recurrent layer, and its inputs; ``layout`` 0."""
    d, g = (2 if direction == "bidirectional" else 1), GATES[operator]

    def some(*shape):
        return (rng.standard_normal(shape) * 0.5).astype(np.float32)

    arrays = [
        some(steps, batch, features), some(d, g * hidden, features), some(d, g * hidden, hidden),
        some(d, 2 * g * hidden) if bias else None,
        None if lengths is None else np.int32(lengths),
        some(d, batch, hidden) if states else None,
    ]  # fmt: skip
    if operator == "LSTM":
        arrays.append(some(d, batch, hidden) if states else None)
        arrays.append(some(d, 3 * hidden) if peepholes else None)
    known = [i for i in weights if arrays[i] is not None]
    return one_node(
        operator, arrays, outputs=3 if operator == "LSTM" else 2, known=known,
        hidden_size=hidden, direction=direction, **attributes,
    )  # fmt: skip


def agrees(proto, inputs, hidden, **options):
    """Asserts that kernels, reference and ONNX Runtime agree; returns the engine's outputs."""
    wanted = onnxruntime_outputs(proto, inputs)
    found = Engine(proto, device="cpu", threads=2, **options).run(inputs)
    exact = reference(load(proto), inputs)
    for name, array in zip(exact, wanted, strict=True):
        assert found[name].shape == array.shape
        allowed = tolerances.sum_of_products(64 * hidden, np.ones(array.shape))
        tolerances.assert_close(found[name], exact[name], allowed)
        tolerances.assert_close(array, exact[name], allowed)
    return found


DIRECTIONS = ("forward", "reverse", "bidirectional")


@pytest.mark.parametrize("operator", GATES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("states", [False, True])
def test_directions_and_initial_states(rng, operator, direction, states):
    proto, inputs = layer(rng, operator, 7, 3, 5, 9, direction, states)
    agrees(proto, inputs, 9)


@pytest.mark.parametrize("operator", GATES)
@pytest.mark.parametrize("direction", DIRECTIONS[1:])
def test_sequences_of_several_lengths(rng, operator, direction):
    proto, inputs = layer(rng, operator, 6, 5, 3, 4, direction, True, [6, 1, 4, 2, 5])
    found = agrees(proto, inputs, 4)
    assert not found["y0"][1:, :, 1].any()


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_gru_resets_before_or_after_the_product(rng, after, bias):
    agrees(*layer(rng, "GRU", 5, 2, 4, 70, linear_before_reset=after, bias=bias), 70)


@pytest.mark.parametrize("coupled", [0, 1])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_lstm_with_peepholes(rng, coupled, clip):
    more = {} if clip is None else {"clip": clip}
    proto, inputs = layer(
        rng, "LSTM", 5, 2, 4, 6, "bidirectional", True, peepholes=True, input_forget=coupled, **more
    )
    agrees(proto, inputs, 6)


@pytest.mark.parametrize("operator", GATES)
def test_a_clip(rng, operator):
    agrees(*layer(rng, operator, 5, 2, 4, 6, clip=0.2), 6)


FUNCTIONS = (
    "Relu", "Tanh", "Sigmoid", "Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid",
    "Elu", "Softsign", "Softplus",
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_and_their_numbers(rng, function):
    numbers = {
        "Affine": ([0.3], [0.1]), "LeakyRelu": ([0.3], []), "ThresholdedRelu": ([0.2], []),
        "ScaledTanh": ([0.7], [0.4]), "HardSigmoid": ([0.3], [0.4]), "Elu": ([0.6], []),
    }  # fmt: skip
    alpha, beta = numbers.get(function, ([], []))
    given = {"activation_alpha": alpha} if alpha else {}
    given |= {"activation_beta": beta} if beta else {}
    proto, inputs = layer(rng, "RNN", 4, 2, 3, 5, activations=[function], **given)
    agrees(proto, inputs, 5)


def test_numbers_go_to_the_functions_that_take_them(rng):
    names = ["HardSigmoid", "Tanh", "LeakyRelu", "Sigmoid", "ScaledTanh", "Affine"]
    proto, inputs = layer(
        rng, "LSTM", 4, 2, 3, 5, "bidirectional", activations=names,
        activation_alpha=[0.25, 0.1, 0.6, 0.5], activation_beta=[0.45, 0.8, 0.1],
    )  # fmt: skip
    graph = load(proto)
    (op,) = (node.op for node in graph.nodes if node.op.kind == "lstm")
    assert op.functions == (
        (unary.HardSigmoid(*np.float32([0.25, 0.45]).tolist()), unary.Tanh(),
         unary.LeakyRelu(float(np.float32(0.1)))),
        (unary.Sigmoid(), unary.ScaledTanh(*np.float32([0.6, 0.8]).tolist()),
         unary.Affine(*np.float32([0.5, 0.1]).tolist())),
    )  # fmt: skip
    exact, found = reference(graph, inputs), Engine(proto, device="cpu").run(inputs)
    for name, array in exact.items():
        allowed = tolerances.sum_of_products(200, np.ones(array.shape))
        tolerances.assert_close(found[name], array, allowed)


@pytest.mark.parametrize("operator", GATES)
def test_layout_of_batches_first(rng, operator):
    """ONNX Runtime has no layout 1: what it makes is what layout 0 makes, turned."""
    proto, inputs = layer(rng, operator, 6, 3, 4, 5, "bidirectional", True)
    plain = Engine(proto, device="cpu").run(inputs)
    turned = {
        name: np.ascontiguousarray(np.swapaxes(array, 0, 1)) for name, array in inputs.items()
    }
    arrays = [turned["x0"]]
    constants = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    arrays += [constants[f"x{i}"] for i in (1, 2, 3)] + [None, turned["x5"]]
    if operator == "LSTM":
        arrays.append(turned["x6"])
    other, fed = one_node(
        operator, arrays, outputs=len(plain), known=(1, 2, 3), hidden_size=5,
        direction="bidirectional", layout=1,
    )  # fmt: skip
    found = Engine(other, device="cpu").run(fed)
    np.testing.assert_array_equal(found["y0"], plain["y0"].transpose(2, 0, 1, 3))
    for name in list(plain)[1:]:
        np.testing.assert_array_equal(found[name], plain[name].transpose(1, 0, 2))


@pytest.mark.parametrize("operator", GATES)
def test_weights_that_are_computed(rng, operator):
    proto, inputs = layer(rng, operator, 4, 2, 3, 5, weights=())
    agrees(proto, inputs, 5)


@pytest.mark.parametrize("length", [-1, 5])
def test_lengths_that_are_not_are_refused(rng, length):
    proto, inputs = layer(rng, "LSTM", 4, 2, 3, 5, lengths=[2, length])
    with pytest.raises(InputError, match=f"sequence_lens: expected 0 to 4, found {length}"):
        Engine(proto, device="cpu").run(inputs)


def test_what_is_refused(rng):
    proto, _ = layer(rng, "GRU", 4, 2, 3, 5, activations=["Sigmoid", "Mystery"])
    with pytest.raises(UnsupportedNodesError, match="activations: 'Mystery' is not known"):
        load(proto)
    proto, _ = layer(rng, "GRU", 4, 2, 3, 5)
    (size,) = (a for a in proto.graph.node[0].attribute if a.name == "hidden_size")
    size.i = 6
    with pytest.raises(InputError, match=r"expected X \[T, N, I\], W \[1, 18, I\] and R"):
        load(proto)


RECORDS = [
    Rnn(((unary.Relu(),),)),
    Rnn(((unary.Tanh(),), (unary.Softsign(),)), clip=0.7),
    Gru(reverse=True),
    Gru(((unary.Sigmoid(), unary.Tanh()),) * 2, reset_after=True),
    Lstm(((unary.Sigmoid(), unary.Tanh(), unary.Tanh()),) * 2),
    Lstm(((unary.HardSigmoid(0.3, 0.4), unary.Elu(0.5), unary.Softplus()),), True, 0.9, True),
]


@pytest.mark.parametrize("op", RECORDS, ids=str)
@pytest.mark.parametrize(
    ("steps", "batch", "hidden"), [(5, 1, 16), (4, 7, 67), (3, 2, 1), (0, 2, 3)]
)
def test_kernels(place, rng, op, steps, batch, hidden):  # noqa: F811
    d, g = op.directions, op.gates
    lstm = op.kind == "lstm"

    def some(*shape):
        return (rng.standard_normal(shape) * 0.5).astype(np.float32)

    arrays = [
        some(steps, batch, d, g * hidden), some(d, g * hidden, hidden),
        some(d, hidden) if getattr(op, "reset_after", False) else None,
        rng.integers(0, steps + 1, batch).astype(np.int32),
        some(d, batch, hidden), some(d, batch, hidden) if lstm else None,
        some(d, 3 * hidden) if lstm and batch > 2 else None,
    ]  # fmt: skip
    known = (1, 2, 3, 6)

    def bound(wanted):
        return tolerances.sum_of_products(64 * hidden, 1 + np.abs(wanted))

    assert "recurrent" in check(place, op, *arrays, known=known, bound=bound)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit(rng, threads):
    """One long row: two threads share the panels of a step."""
    proto, inputs = layer(rng, "LSTM", 3, 1, 8, 320)
    found = Engine(proto, device="cpu", threads=threads).run(inputs)
    exact = reference(load(proto), inputs)
    for name, array in exact.items():
        allowed = tolerances.sum_of_products(320 * 8, np.ones(array.shape))
        tolerances.assert_close(found[name], array, allowed)
        other = Engine(proto, device="cpu", threads=3 - threads).run(inputs)[name]
        np.testing.assert_array_equal(found[name], other)


def test_costs():
    op = Lstm()
    values = [Value("g", (3, 2, 1, 20)), Value("r", (1, 20, 5))]
    outputs = [Value(f"y{i}", s) for i, (s, _) in enumerate(op.infer(values))]
    assert [v.shape for v in outputs] == [(3, 1, 2, 5), (1, 2, 5), (1, 2, 5)]
    assert op.flops(values, outputs) == 2 * 3 * 2 * 20 * 5
    assert math.isinf(op.clip)


@pytest.mark.parametrize("special", [40.0, math.nan, math.inf])
def test_states_are_rounded_by_the_range_of_all_rows(rng, instruction_set, special):
    """A state of the last of six rows, which no task of four has, sets the steps of all."""
    steps, batch, hidden = 4, 6, 70
    gates = (rng.standard_normal((steps, batch, 2, 4 * hidden)) * 0.5).astype(np.float32)
    weight = (rng.standard_normal((2, 4 * hidden, hidden)) * 0.1).astype(np.float32)
    state = np.zeros((2, batch, hidden), np.float32)
    state[:, -1, 3] = special
    lengths = np.int32([4, 0, 2, 4, 3, 1])
    op = DynamicLstm(DynamicLstm().functions * 2)
    names = "gates", "weight", None, "lengths", "state"
    node = Node("layer", op, names, ("y", "h", "c"))
    given = {"gates": gates, "state": state}
    inputs = tuple(Value(name, array.shape) for name, array in given.items())
    constants = {"weight": weight, "lengths": lengths}
    graph = Graph("layer", inputs, node.outputs, (node,), constants)
    (layer,) = inspection.inspect(graph).on["cpu"].running
    assert layer.kernel == "recurrent"
    exact = reference(graph, given)
    for threads in (1, 2):
        with Engine(graph, device="cpu", threads=threads) as engine:
            found = engine.run(given)
        for name, array in exact.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)
